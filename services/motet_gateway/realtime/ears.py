"""The listening half of a session: the input buffer, turns as they are detected, and what was said in them.

Times are ms of all the sound that the session was sent. Without turn detection the client commits; with it the voice
activity service tells where turns begin and end, and the client may still commit what is there.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Protocol

from motet_pipelines.listen import Sound, listen
from motet_shared.errors import BadRequest, PayloadTooLarge
from motet_shared.messages import Detect, SpeechEdge

from ..asgi import ClientGone
from ..problems import Problem
from ..service import Service
from .audio_settings import AudioSettings, ServerVad
from .channel import Channel
from .conversation import Conversation, Stored, new_id
from .formats import decode, input_rate
from .transcripts import Transcripts

SHORTEST_MS = 100  # of a commit


class EmptyBuffer(BadRequest):
    code = "input_audio_buffer_commit_empty"


class Listener(Protocol):
    """Who is told of turns."""

    @property
    def busy(self) -> bool:
        """Whether a reply is being made."""

    async def interrupted(self) -> None:
        """Somebody speaks while a reply may be under way."""

    async def turn_ended(self, item: Stored, *, silent: bool = False) -> None:
        """A turn was committed that wants a reply; `silent`: even if nobody has said a word in it."""


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
        self._item_id = ""  # of the turn that is being spoken
        self._start = 0.0  # ms: where that turn begins
        self._task: asyncio.Task[None] | None = None

    @property
    def speaking(self) -> bool:
        """Whether the user is in the middle of a turn."""
        return bool(self._item_id)

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
        await self._sound.hear(pcm)
        if detection is not None:
            await self._check_idle(detection)

    async def commit(self) -> None:
        """What is in the buffer becomes an item, and no response."""
        start, end = max(self._floor, self._sound.begin), self._sound.now
        if end - start < SHORTEST_MS:
            raise EmptyBuffer(
                f"the input buffer has {end - start:.0f} ms of audio; append at least {SHORTEST_MS} ms before a commit"
            )
        item_id, self._item_id = self._item_id or new_id("item"), ""
        await self._commit(item_id, start, end)

    async def clear(self) -> None:
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
            self._sound.hold = None

    async def close(self) -> None:
        self._item_id = ""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    # --------------------------------------------------------------------------------------------------------- turns
    async def _attend(self, detection: ServerVad, sound: Sound) -> None:
        """Turns, as long as the session is set to detect them. What goes wrong is told; the next sound tries again."""
        request = Detect(
            sample_rate=sound.rate,
            threshold=detection.threshold,
            prefix_padding_ms=detection.prefix_padding_ms,
            silence_duration_ms=detection.silence_duration_ms,
        )
        try:
            async with aclosing(
                listen(self._service.bus, request, sound, patience=self._service.config.patience)
            ) as edges:
                async for edge in edges:
                    await (self._started if edge.kind == "start" else self._stopped)(edge, detection)
        except ClientGone:
            pass  # the session notices by itself
        except Exception as error:
            self._item_id = ""
            sound.hold = None
            await _tell_unless_gone(self._channel, Problem.of(error))

    async def _started(self, edge: SpeechEdge, detection: ServerVad) -> None:
        self._item_id = new_id("item")
        event = self._channel.event("input_audio_buffer.speech_started", audio_start_ms=edge.ms, item_id=self._item_id)
        await self._channel.send(event)
        self._start = max(edge.ms, self._floor)
        if detection.interrupt_response:
            await self._listener.interrupted()

    async def _stopped(self, edge: SpeechEdge, detection: ServerVad) -> None:
        self._idle_from = edge.ms
        item_id, self._item_id = self._item_id, ""
        if not item_id:
            return  # the client committed it meanwhile
        event = self._channel.event("input_audio_buffer.speech_stopped", audio_end_ms=edge.ms, item_id=item_id)
        await self._channel.send(event)
        item = await self._commit(item_id, max(self._start, self._floor), edge.ms)
        if detection.create_response:
            await self._listener.turn_ended(item)

    async def _check_idle(self, detection: ServerVad) -> None:
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

    async def _commit(self, item_id: str, start: float, end: float) -> Stored:
        """A user's item from the sound between two times; empty if there is none."""
        pcm = self._sound.between(start, end)
        self._forget(end)
        return await self._transcripts.commit(item_id, pcm, self._sound.rate, self._settings.transcription)

    def _forget(self, until: float) -> None:
        self._floor = max(self._floor, until)
        if self._task is None:
            self._sound.forget(until)
        else:  # it is still being heard, and goes by itself
            self._sound.hold, self._sound.done = None, max(self._sound.done, until)


async def _tell_unless_gone(channel: Channel, problem: Problem) -> None:
    with suppress(ClientGone):
        await channel.send(channel.error(problem))
