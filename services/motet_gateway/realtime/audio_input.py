"""Receive the audio input of a session: buffer it, detect turns and transcribe them.

Times are in ms of all audio that the session has received. Without turn detection the client
commits the buffer; with it the voice activity service reports where turns begin and end, and the
client may still commit what is buffered. Where the speech recognizer works live, the transcript
grows while the user speaks.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone
from motet_gateway.http.problems import Problem
from motet_pipelines.instances import served
from motet_pipelines.voice.audio_buffer import AudioBuffer
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.turns import Ended, Started, Turn, turns
from motet_shared.errors import BadRequest, MotetError, PayloadTooLarge
from motet_shared.messages import Listen

from .audio_settings import AudioSettings, Transcription, listener
from .channel import Channel
from .conversation import Conversation, Stored, new_id
from .formats import decode, input_rate
from .item_transcription import HeardPart, ItemTranscription
from .turn_detection import TurnDetection

SHORTEST_MS = 100  # the shortest commit


class EmptyBuffer(BadRequest):
    code = "input_audio_buffer_commit_empty"


class Listener(Protocol):
    """Receive the turns of an audio input."""

    @property
    def busy(self) -> bool:
        """Return True if a reply is being generated or is about to be."""

    @property
    def replying(self) -> bool:
        """Return True if a reply is being generated."""

    def hear(self, pcm_bytes: int, rate: int) -> None:
        """Account for received audio. Raises if the audio is not to be accepted."""

    async def interrupted(self) -> None:
        """Handle that the user speaks while a reply may be under way."""

    async def turn_ended(self, item: Stored, *, silent: bool = False) -> None:
        """Handle a committed turn that asks for a reply; `silent`: even if nothing was said."""


@dataclass(slots=True)
class _Open:
    """An item that is being spoken; its id is assigned before the item exists."""

    item_id: str
    start: float  # ms
    turn: Turn | None = None  # the detected turn; None: the client commits
    captions: Captions | None = None  # without turn detection

    def release(self) -> Captions | None:
        return self.captions if self.turn is None else self.turn.release()


class AudioInput:
    """Keep the audio input of one session: its buffer, its open turn and its turn detection."""

    def __init__(
        self,
        service: GatewayContext,
        channel: Channel,
        conversation: Conversation,
        transcripts: ItemTranscription,
        listener: Listener,
        settings: AudioSettings,
    ):
        self._service, self._channel, self._conversation = service, channel, conversation
        self._transcripts, self._listener, self._settings = transcripts, listener, settings
        self._sound = AudioBuffer(input_rate(settings.input_format))
        self._floor = 0.0  # ms: audio before it is committed or cleared
        self._idle_from = 0.0  # ms
        self._sounding_until = 0.0  # ms: when the client will have played the reply
        self._open: _Open | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def speaking(self) -> bool:
        """Return True if the user is in the middle of a detected turn."""
        return self._open is not None and self._open.turn is not None

    @property
    def heard_ms(self) -> float:
        """Return the ms of audio received since the session began, committed or not."""
        return self._sound.now

    # -------------------------------------------------------------------------------- client events
    async def append(self, audio: str) -> None:
        pcm = decode(audio, self._settings.input_format)
        detection = self._settings.turn_detection
        if detection is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._attend(detection, self._sound), name="ears")
        limit = self._service.config.max_message
        if len(self._sound) + len(pcm) > limit:
            message = f"the input buffer holds {len(self._sound)} bytes of PCM, at most {limit}; commit or clear it"
            raise PayloadTooLarge(message, param="audio")
        self._listener.hear(len(pcm), self._sound.rate)
        await self._sound.append(pcm)
        if detection is None:
            self._dictate()
        else:
            await self._check_idle(detection)

    async def commit(self) -> None:
        """Commit the buffer as an item, without asking for a response.

        Raises EmptyBuffer if it holds less than `SHORTEST_MS` of audio.
        """
        self._sound.drop_partial_sample()
        start, end = max(self._floor, self._sound.begin), self._sound.now
        if end - start < SHORTEST_MS:
            raise EmptyBuffer(
                f"the input buffer has {end - start:.0f} ms of audio; append at least {SHORTEST_MS} ms before a commit"
            )
        current, self._open = self._open, None
        captions = None if current is None else current.release()
        if captions is not None:
            captions.reach(end)
            captions.finish()
        await self._commit(
            new_id("item") if current is None else current.item_id, start, end, captions
        )

    async def clear(self) -> None:
        self._sound.drop_partial_sample()
        await self._drop(keep_turn=True)
        self._forget(self._sound.now)
        await self._channel.send(self._channel.event("input_audio_buffer.cleared"))

    async def configure(self, settings: AudioSettings) -> None:
        """Apply changed audio settings. A change of the input format empties the buffer."""
        before, self._settings = self._settings, settings
        if before.input_format != settings.input_format:
            await self.close()
            now = self._sound.now
            self._sound = AudioBuffer(input_rate(settings.input_format), now)
            self._floor = self._idle_from = now
        elif before.turn_detection != settings.turn_detection:
            await self.close()
            self._sound.release(self._floor)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._drop()

    # ---------------------------------------------------------------------------------------- turns
    async def _attend(self, detection: TurnDetection, sound: AudioBuffer) -> None:
        """Handle turns while turn detection is set.

        A failure is sent to the client as an error; the next audio starts detection again.
        """
        patience = self._service.config.patience
        told = turns(
            self._service.bus,
            sound,
            detection.policy(),
            self._captions,
            self._is_replying,
            patience=patience,
        )
        try:
            async with aclosing(told) as events:
                async for event in events:
                    if isinstance(event, Started):
                        await self._started(event.turn, detection)
                    else:
                        await self._ended(event, detection)
        except ClientGone:
            pass  # the session detects the disconnect by itself
        except Exception as error:
            await self._drop()
            sound.release(self._floor)
            await _tell_unless_gone(self._channel, Problem.of(error))

    def _is_replying(self, ms: float) -> bool:
        """Return True if a reply was being generated or played at `ms` of the input."""
        return self._listener.replying or ms < self._sounding_until

    async def _started(self, turn: Turn, detection: TurnDetection) -> None:
        current = self._open = _Open(new_id("item"), turn.start, turn)
        where = {"audio_start_ms": round(turn.start), "item_id": current.item_id}
        await self._channel.send(self._channel.event("input_audio_buffer.speech_started", **where))
        if turn.captions is not None and self._settings.transcription is not None:
            self._transcripts.follow(current.item_id, turn.captions)
        if detection.interrupt_response:
            self._sounding_until = 0.0
            await self._listener.interrupted()

    async def _ended(self, event: Ended, detection: TurnDetection) -> None:
        self._idle_from = event.ms
        current, self._open = self._open, None
        if current is None:
            return  # the client committed it in the meantime
        where = {"audio_end_ms": event.ms, "item_id": current.item_id}
        await self._channel.send(self._channel.event("input_audio_buffer.speech_stopped", **where))
        start = max(current.start, self._floor)
        item = await self._commit(current.item_id, start, event.ms, current.release())
        if detection.create_response:
            await self._listener.turn_ended(item)

    async def _check_idle(self, detection: TurnDetection) -> None:
        """Ask for a reply if the user has been silent for `idle_timeout_ms`."""
        now = self._sound.now
        if detection.idle_timeout_ms is None or self.speaking:
            return
        if self._listener.busy:
            self._idle_from = now
        elif now - self._idle_from >= detection.idle_timeout_ms:
            start, self._idle_from, item_id = self._idle_from, now, new_id("item")
            event = self._channel.event(
                "input_audio_buffer.timeout_triggered",
                audio_start_ms=round(start),
                audio_end_ms=round(now),
                item_id=item_id,
            )
            await self._channel.send(event)
            await self._listener.turn_ended(await self._commit(item_id, now, now), silent=True)

    def rest(self, ms: float) -> None:
        """Count silence from the end of the current reply, which plays `ms` more at the client."""
        self._idle_from = self._sound.now + ms
        self._sounding_until = self._idle_from if ms else 0.0

    # ---------------------------------------------------------------------------------------- words
    def _captions(self, start: float) -> Captions | None:
        """Return live captions from `start` ms on; None if no recognizer transcribes live."""
        settings = self._settings.transcription or Transcription()
        directory = self._service.bus.directory
        try:
            model = listener(directory, self._settings.transcription)
        except MotetError:
            return None  # the transcription of the turn reports the error
        card = served(directory, "asr").get(model)
        if card is None or not card.live:
            return None
        request = Listen(
            model=model,
            sample_rate=self._sound.rate,
            language=settings.language or "",
            prompt=settings.prompt or "",
        )
        return Captions(
            self._service.bus, request, self._sound, start, patience=self._service.config.patience
        )

    def _dictate(self) -> None:
        """Transcribe live what the client will commit, if transcription is enabled."""
        if self._settings.transcription is None:
            return
        start = max(self._floor, self._sound.begin)
        if self._open is None and (captions := self._captions(start)) is not None:
            self._open = _Open(new_id("item"), start, captions=captions)
            self._transcripts.follow(self._open.item_id, captions)
        if self._open is not None and self._open.captions is not None:
            self._open.captions.reach(self._sound.now)

    async def _drop(self, *, keep_turn: bool = False) -> None:
        """Discard the words of the open item; `keep_turn`: keep what follows in the same turn."""
        current = self._open
        if current is None:
            return
        if not (keep_turn and self.speaking):
            self._open = None
        if (captions := current.release()) is not None:
            await captions.close()
        await self._transcripts.forget(current.item_id)

    # --------------------------------------------------------------------------------------- buffer
    async def _commit(
        self, item_id: str, start: float, end: float, captions: Captions | None = None
    ) -> Stored:
        """Commit the audio between two times in ms as a user item; it may be empty."""
        pcm = self._sound.between(start, end)
        self._forget(end)
        return await self._transcripts.commit(
            item_id, HeardPart(pcm, self._sound.rate, self._settings.transcription, captions)
        )

    def _forget(self, until: float) -> None:
        self._floor = max(self._floor, until)
        if self._task is None:
            self._sound.forget(until)
        else:  # turn detection still reads it and forgets it by itself
            self._sound.release(until)
            if self.speaking:
                self._sound.hold(self._floor)


async def _tell_unless_gone(channel: Channel, problem: Problem) -> None:
    with suppress(ClientGone):
        await channel.send(channel.error(problem))
