"""The listening half of a session: the input buffer, turns as they are detected, and what was said in them.

Times are ms of all the sound that the session was sent. Without turn detection the client commits; with it the voice
activity service tells where turns begin and end, and the client may still commit what is there. Where the recognizer
hears live, the words come while they are spoken.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from motet_pipelines.captions import Captions
from motet_pipelines.instances import served
from motet_pipelines.sound import Sound
from motet_pipelines.turns import Ended, Started, Turn, turns
from motet_shared.errors import BadRequest, MotetError, PayloadTooLarge
from motet_shared.messages import Listen

from ..asgi import ClientGone
from ..problems import Problem
from ..service import Service
from .audio_settings import AudioSettings, Transcription, listener
from .channel import Channel
from .conversation import Conversation, Stored, new_id
from .formats import decode, input_rate
from .transcripts import Heard, Transcripts
from .turn_detection import TurnDetection

SHORTEST_MS = 100  # of a commit


class EmptyBuffer(BadRequest):
    code = "input_audio_buffer_commit_empty"


class Listener(Protocol):
    """Who is told of turns."""

    @property
    def busy(self) -> bool:
        """Whether a reply is being made, or about to be."""

    @property
    def replying(self) -> bool:
        """Whether a reply is being made."""

    def hear(self, pcm_bytes: int, rate: int) -> None:
        """Sound comes. Raises if it is not to be heard."""

    async def interrupted(self) -> None:
        """Somebody speaks while a reply may be under way."""

    async def turn_ended(self, item: Stored, *, silent: bool = False) -> None:
        """A turn was committed that wants a reply; `silent`: even if nobody has said a word in it."""


@dataclass(slots=True)
class _Open:
    """The item that is being spoken: its id is known before it is one."""

    item_id: str
    start: float  # ms
    turn: Turn | None = None  # that was detected; None: the client will commit
    captions: Captions | None = None  # of no turn

    def release(self) -> Captions | None:
        return self.captions if self.turn is None else self.turn.release()


class Ears:
    """Of one session."""

    def __init__(
        self,
        service: Service,
        channel: Channel,
        conversation: Conversation,
        transcripts: Transcripts,
        listener: Listener,
        settings: AudioSettings,
    ):
        self._service, self._channel, self._conversation = service, channel, conversation
        self._transcripts, self._listener, self._settings = transcripts, listener, settings
        self._sound = Sound(input_rate(settings.input_format))
        self._floor = 0.0  # ms: what was before is committed or cleared
        self._idle_from = 0.0  # ms
        self._sounding_until = 0.0  # ms: when the client has played the reply
        self._open: _Open | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def speaking(self) -> bool:
        """Whether the user is in the middle of a turn."""
        return self._open is not None and self._open.turn is not None

    @property
    def heard_ms(self) -> float:
        """How much sound was taken in since the session began, whatever became of it."""
        return self._sound.now

    # ------------------------------------------------------------------------------------------------- client events
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
        await self._sound.hear(pcm)
        if detection is None:
            self._dictate()
        else:
            await self._check_idle(detection)

    async def commit(self) -> None:
        """What is in the buffer becomes an item, and no response."""
        self._sound.tear_off()
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
        await self._commit(new_id("item") if current is None else current.item_id, start, end, captions)

    async def clear(self) -> None:
        self._sound.tear_off()
        await self._drop(keep_turn=True)
        self._forget(self._sound.now)
        await self._channel.send(self._channel.event("input_audio_buffer.cleared"))

    async def configure(self, settings: AudioSettings) -> None:
        """Listen by other rules. Another format empties the buffer."""
        before, self._settings = self._settings, settings
        if before.input_format != settings.input_format:
            await self.close()
            now = self._sound.now
            self._sound = Sound(input_rate(settings.input_format), now)
            self._floor = self._idle_from = now
        elif before.turn_detection != settings.turn_detection:
            await self.close()
            self._sound.settle(self._floor)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._drop()

    # --------------------------------------------------------------------------------------------------------- turns
    async def _attend(self, detection: TurnDetection, sound: Sound) -> None:
        """Turns, as long as the session is set to detect them. What goes wrong is told; the next sound tries again."""
        patience = self._service.config.patience
        told = turns(
            self._service.bus, sound, detection.manners(), self._captions, self._is_replying, patience=patience
        )
        try:
            async with aclosing(told) as events:
                async for event in events:
                    if isinstance(event, Started):
                        await self._started(event.turn, detection)
                    else:
                        await self._ended(event, detection)
        except ClientGone:
            pass  # the session notices by itself
        except Exception as error:
            await self._drop()
            sound.settle(self._floor)
            await _tell_unless_gone(self._channel, Problem.of(error))

    def _is_replying(self, ms: float) -> bool:
        """Whether a reply was made or played when the sound was there."""
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
            return  # the client committed it meanwhile
        where = {"audio_end_ms": event.ms, "item_id": current.item_id}
        await self._channel.send(self._channel.event("input_audio_buffer.speech_stopped", **where))
        start = max(current.start, self._floor)
        item = await self._commit(current.item_id, start, event.ms, current.release())
        if detection.create_response:
            await self._listener.turn_ended(item)

    async def _check_idle(self, detection: TurnDetection) -> None:
        """Nobody has said anything for so long that the model is asked to."""
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
        """A reply ends, and sounds for another `ms` at the client: silence counts from then on."""
        self._idle_from = self._sound.now + ms
        self._sounding_until = self._idle_from if ms else 0.0

    # --------------------------------------------------------------------------------------------------------- words
    def _captions(self, start: float) -> Captions | None:
        """What is said from `start` on, as it is understood; None if no recognizer hears live."""
        settings = self._settings.transcription or Transcription()
        directory = self._service.bus.directory
        try:
            model = listener(directory, self._settings.transcription)
        except MotetError:
            return None  # the transcription of the turn will say so
        card = served(directory, "asr").get(model)
        if card is None or not card.live:
            return None
        request = Listen(
            model=model,
            sample_rate=self._sound.rate,
            language=settings.language or "",
            prompt=settings.prompt or "",
        )
        return Captions(self._service.bus, request, self._sound, start, patience=self._service.config.patience)

    def _dictate(self) -> None:
        """Understand what the client will commit, if it wants to know the words."""
        if self._settings.transcription is None:
            return
        start = max(self._floor, self._sound.begin)
        if self._open is None and (captions := self._captions(start)) is not None:
            self._open = _Open(new_id("item"), start, captions=captions)
            self._transcripts.follow(self._open.item_id, captions)
        if self._open is not None and self._open.captions is not None:
            self._open.captions.reach(self._sound.now)

    async def _drop(self, *, keep_turn: bool = False) -> None:
        """The words so far are nobody's; `keep_turn`: those that follow in the same turn are somebody's again."""
        current = self._open
        if current is None:
            return
        if not (keep_turn and self.speaking):
            self._open = None
        if (captions := current.release()) is not None:
            await captions.close()
        await self._transcripts.forget(current.item_id)

    # --------------------------------------------------------------------------------------------------------- buffer
    async def _commit(self, item_id: str, start: float, end: float, captions: Captions | None = None) -> Stored:
        """A user's item from the sound between two times; empty if there is none."""
        pcm = self._sound.between(start, end)
        self._forget(end)
        return await self._transcripts.commit(
            item_id, Heard(pcm, self._sound.rate, self._settings.transcription, captions)
        )

    def _forget(self, until: float) -> None:
        self._floor = max(self._floor, until)
        if self._task is None:
            self._sound.forget(until)
        else:  # it is still being heard, and goes by itself
            self._sound.settle(until)
            if self.speaking:
                self._sound.hold(self._floor)


async def _tell_unless_gone(channel: Channel, problem: Problem) -> None:
    with suppress(ClientGone):
        await channel.send(channel.error(problem))
