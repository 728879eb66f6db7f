"""Receive the audio of a user: buffer it, detect turns and transcribe them.

Times are in ms of all audio that was received. Without turn detection the caller commits the
buffer; with it the voice activity service reports where turns begin and end, and the caller may
still commit what is buffered. Where the recognizer works live, the transcript grows while the user
speaks.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from motet_media.audio import duration_ms
from motet_pipelines.voice.audio_buffer import AudioBuffer
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.turns import Ended, Started, Turn, turns
from motet_shared.errors import BadRequest, MotetError, PayloadTooLarge
from motet_shared.messages import Listen
from motet_shared.wire.instances import served

from .conversation_state import InputState
from .events import AudioCleared, EventSink, Failed, IdleTimeout, SpeechStarted, SpeechStopped
from .floor import Floor
from .history import Item, new_id
from .item_transcription import ItemTranscription, PartAudio
from .replies import Replies, ReplyContext
from .settings import ConversationSettings, TranscriptionSettings, TurnSettings
from .user_sound import SHORTEST_MS, is_heard


class EmptyBuffer(BadRequest):
    code = "input_audio_buffer_commit_empty"


@dataclass(slots=True)
class _OpenItem:
    """An item that is being spoken; its id is assigned before the item exists."""

    item_id: str
    start: float  # ms
    turn: Turn | None = None  # the detected turn; None: the caller commits
    captions: Captions | None = None  # without turn detection

    def release(self) -> Captions | None:
        return self.captions if self.turn is None else self.turn.release()


class AudioInput:
    """Keep the audio of the user: its buffer, its open turn and its turn detection."""

    def __init__(
        self,
        context: ReplyContext,
        settings: ConversationSettings,
        floor: Floor,
        transcription: ItemTranscription,
        replies: Replies,
        events: EventSink,
    ):
        self._bus, self._admission, self._limits = context.bus, context.admission, context.limits
        self._settings, self._floor = settings, floor
        self._transcription, self._replies, self._events = transcription, replies, events
        self._audio = AudioBuffer(settings.rate)
        self._begin = 0.0  # ms: audio before it is committed or cleared
        self._open: _OpenItem | None = None
        self._items = 0  # that were begun
        self._detection: asyncio.Task[None] | None = None

    @property
    def is_heard(self) -> bool:
        """Return True if replies get the sound of what is committed now, not a transcript."""
        return is_heard(self._bus.directory, self._settings.reply)

    # ---------------------------------------------------------------------------------------- state
    @property
    def is_quiet(self) -> bool:
        """Return True if no turn is open."""
        return self._open is None and not self._audio.is_held

    async def rest(self) -> None:
        """End the detection of turns at a quiet time; `go_on` begins it again, with what it may not have heard."""
        if self._detection is not None and not self._detection.done():
            self._detection.cancel()
            await asyncio.gather(self._detection, return_exceptions=True)
            self._audio.forget(self._audio.done)

    @property
    def _rests(self) -> bool:
        return self._detection is not None and self._detection.cancelled()

    def go_on(self) -> None:
        """Begin the detection of turns again that `rest` has ended."""
        if self._rests and self._settings.turns is not None:
            self._detect_turns(self._settings.turns)

    def state(self) -> InputState:
        return InputState(self._items, self._begin, self._audio.state(), self._rests)

    def restore(self, state: InputState) -> None:
        self._items, self._begin = state.items, state.begin
        self._audio = AudioBuffer.restored(state.audio)
        if state.detects and self._settings.turns is not None:
            self._detect_turns(self._settings.turns)

    # --------------------------------------------------------------------------------------- inputs
    async def append(self, pcm: bytes) -> None:
        """Append PCM. Raises PayloadTooLarge if the buffer is full."""
        turn_settings = self._settings.turns
        if turn_settings is not None and (self._detection is None or self._detection.done()):
            self._detect_turns(turn_settings)
        most = self._limits.max_bytes
        if len(self._audio) + len(pcm) > most:
            self._audio.drop_done()
        if len(self._audio) + len(pcm) > most:
            message = f"the input buffer holds {len(self._audio)} bytes of PCM, at most {most}; commit or clear it"
            raise PayloadTooLarge(message, param="audio")
        self._admission.receive_audio(len(pcm), self._audio.rate)
        self._floor.position = self._audio.now + duration_ms(len(pcm), self._audio.rate)
        await self._audio.append(pcm)
        if turn_settings is None:
            self._caption_commit()
        else:
            await self._check_idle(turn_settings)

    async def commit(self) -> None:
        """Commit the buffer as an item, without a request for a reply.

        Raises EmptyBuffer if it holds less than `SHORTEST_MS` of audio.
        """
        self._audio.drop_partial_sample()
        start, end = max(self._begin, self._audio.begin), self._audio.now
        if end - start < SHORTEST_MS:
            raise EmptyBuffer(
                f"the input buffer has {end - start:.0f} ms of audio; append at least {SHORTEST_MS} ms before a commit"
            )
        current = self._open
        self._set_open(None)
        captions = None if current is None else current.release()
        if captions is not None:
            captions.reach(end)
            captions.finish()
        await self._commit(
            self._new_item() if current is None else current.item_id, start, end, captions
        )

    async def clear(self) -> None:
        self._audio.drop_partial_sample()
        await self._drop(keep_turn=True)
        self._forget(self._audio.now)
        await self._events.emit(AudioCleared())

    async def configure(self, settings: ConversationSettings) -> None:
        """Apply changed settings. A change of the rate empties the buffer."""
        before, self._settings = self._settings, settings
        if before.rate != settings.rate:
            await self.close()
            now = self._audio.now
            self._audio = AudioBuffer(settings.rate, now)
            self._begin = self._floor.idle_from = now
        elif before.turns != settings.turns:
            await self.close()
            self._audio.release(self._begin)
            self._audio.forget(self._begin)

    async def finish(self) -> None:
        """End the audio: a turn that is open ends, and is handled like any other."""
        self._audio.end()
        if self._detection is not None:
            await self._detection

    async def close(self) -> None:
        if self._detection is not None:
            self._detection.cancel()
            await asyncio.gather(self._detection, return_exceptions=True)
            self._detection = None
        await self._drop()

    # ---------------------------------------------------------------------------------------- turns
    def _detect_turns(self, settings: TurnSettings) -> None:
        self._detection = asyncio.create_task(
            self._detect(settings, self._audio), name="turn detection"
        )

    async def _detect(self, settings: TurnSettings, audio: AudioBuffer) -> None:
        """Handle turns while turn detection is set.

        A failure is reported; the next audio starts detection again.
        """
        detected = turns(
            self._bus,
            audio,
            settings.policy,
            self._captions,
            self._floor.is_replying,
            patience=self._limits.patience,
        )
        try:
            async with aclosing(detected) as events:
                async for event in events:
                    if isinstance(event, Started):
                        await self._start_turn(event.turn, settings)
                    else:
                        await self._end_turn(event, settings)
        except Exception as error:
            await self._drop()
            audio.release(self._begin)
            await self._events.emit(Failed(error))

    async def _start_turn(self, turn: Turn, settings: TurnSettings) -> None:
        item_id = self._new_item()
        self._set_open(_OpenItem(item_id, turn.start, turn))
        await self._events.emit(SpeechStarted(item_id, round(turn.start)))
        if turn.captions is not None and self._shows_captions:
            self._transcription.follow(item_id, turn.captions)
        if settings.barge_in:
            self._floor.playing_until = 0.0
            self._replies.barge_in()

    async def _end_turn(self, event: Ended, settings: TurnSettings) -> None:
        self._floor.idle_from = event.ms
        current = self._open
        self._set_open(None)
        if current is None:
            return  # the caller committed it in the meantime
        await self._events.emit(SpeechStopped(current.item_id, event.ms))
        start = max(current.start, self._begin)
        item = await self._commit(current.item_id, start, event.ms, current.release())
        if settings.reply:
            self._replies.answer(item)

    async def _check_idle(self, settings: TurnSettings) -> None:
        """Ask for a reply if the user has been silent for `idle_timeout_ms`."""
        now = self._audio.now
        if settings.idle_timeout_ms is None or self._floor.user_speaks:
            return
        if self._floor.busy:
            self._floor.idle_from = now
        elif now - self._floor.idle_from >= settings.idle_timeout_ms:
            start, self._floor.idle_from, item_id = self._floor.idle_from, now, self._new_item()
            await self._events.emit(IdleTimeout(item_id, round(start), round(now)))
            self._replies.answer(await self._commit(item_id, now, now), even_if_empty=True)

    def _new_item(self) -> str:
        self._items += 1
        return new_id("item", f"user {self._items}")

    def _set_open(self, item: _OpenItem | None) -> None:
        self._open = item
        self._floor.user_speaks = item is not None and item.turn is not None

    # ------------------------------------------------------------------------------------- captions
    def _captions(self, start: float) -> Captions | None:
        """Return live captions from `start` ms on.

        None if no recognizer transcribes live, or replies need no transcript and none is reported.
        """
        if self._settings.transcription is None and self.is_heard:
            return None
        settings = self._settings.transcription or TranscriptionSettings()
        try:
            model = self._admission.recognizer(settings.model)
        except MotetError:
            return None  # the transcription of the turn reports the error
        card = served(self._bus.directory, "asr").get(model)
        if card is None or not card.live:
            return None
        request = Listen(
            model=model,
            sample_rate=self._audio.rate,
            language=settings.language,
            prompt=settings.prompt,
        )
        return Captions(self._bus, request, self._audio, start, patience=self._limits.patience)

    @property
    def _shows_captions(self) -> bool:
        """Return True if transcripts are reported while they grow; those with scores are not."""
        settings = self._settings.transcription
        return settings is not None and not settings.logprobs

    def _caption_commit(self) -> None:
        """Transcribe live what the caller will commit, if transcripts are reported."""
        if not self._shows_captions:
            return
        start = max(self._begin, self._audio.begin)
        if self._open is None and (captions := self._captions(start)) is not None:
            self._set_open(_OpenItem(self._new_item(), start, captions=captions))
            assert self._open is not None
            self._transcription.follow(self._open.item_id, captions)
        if self._open is not None and self._open.captions is not None:
            self._open.captions.reach(self._audio.now)

    async def _drop(self, *, keep_turn: bool = False) -> None:
        """Discard the words of the open item; `keep_turn`: keep what follows in the same turn."""
        current = self._open
        if current is None:
            return
        if not (keep_turn and self._floor.user_speaks):
            self._set_open(None)
        if (captions := current.release()) is not None:
            await captions.close()
        self._transcription.forget(current.item_id)

    # --------------------------------------------------------------------------------------- buffer
    async def _commit(
        self, item_id: str, start: float, end: float, captions: Captions | None = None
    ) -> Item:
        """Commit the audio between two times in ms as a user item; it may be empty."""
        pcm = self._audio.between(start, end)
        self._forget(end)
        audio = PartAudio(
            pcm, self._audio.rate, self._settings.transcription, captions, heard=self.is_heard
        )
        rolling = self._settings.reply is None  # no reply sees the items
        return await self._transcription.commit(item_id, audio, rolling=rolling)

    def _forget(self, until: float) -> None:
        self._begin = max(self._begin, until)
        if self._detection is None:
            self._audio.forget(until)
        else:  # turn detection still reads it and forgets it by itself
            self._audio.release(until)
            if self._floor.user_speaks:
                self._audio.hold(self._begin)
