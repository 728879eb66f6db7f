"""Transcribe the audio of user items, and store the text in the conversation.

Transcription runs concurrently, at most once per item; a reply that needs the text waits for it.
Where live captions exist, only their last words remain to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from motet_media.audio import SAMPLE_BYTES, duration_ms
from motet_pipelines.answers import WireError, wire_error
from motet_pipelines.voice.captions import Captions
from motet_pipelines.voice.retranscription import continued
from motet_pipelines.voice.transcribe import NO_AUDIO
from motet_pipelines.voice.voice import TokenScores, transcribe_turn
from motet_shared.errors import MotetError, from_wire
from motet_shared.messages import Transcribe
from motet_shared.wire.bus import Bus

from .admission import Admission, Store
from .events import (
    AudioCommitted,
    EventSink,
    TranscriptCompleted,
    TranscriptDelta,
    TranscriptFailed,
)
from .history import History, Item, user_audio_item
from .seeds import new_seed
from .settings import ConversationLimits, TranscriptionSettings
from .user_sound import SOUND, recordings


@dataclass(frozen=True, slots=True)
class PartAudio:
    """PCM of one content part, its transcription settings, and its live captions if any.

    heard: replies get the sound, and no transcript unless one is reported.
    """

    pcm: bytes
    rate: int  # Hz
    settings: TranscriptionSettings | None  # None: the transcript is not reported
    captions: Captions | None = None
    heard: bool = False

    @property
    def has_words(self) -> bool:
        """Return True if there is anything to transcribe."""
        return self.captions is not None or len(self.pcm) >= SAMPLE_BYTES

    def keep(self, item: Item, part: int) -> None:
        """Keep the sound in a part of `item` if replies get it."""
        if self.heard and (files := recordings(self.pcm, self.rate)):
            item["content"][part][SOUND] = files

    @property
    def scored(self) -> bool:
        """Return True if log-probabilities are reported."""
        return self.settings is not None and self.settings.logprobs

    @property
    def seconds(self) -> float:
        return duration_ms(len(self.pcm), self.rate) / 1000


class Transcript:
    """Report the transcript of one part if `shown`; the deltas add up to the final text."""

    def __init__(
        self, events: EventSink, item_id: str, part: int, *, shown: bool, scored: bool = False
    ):
        self.text = ""  # reported so far
        self._scores: TokenScores | None = [] if scored else None
        self._events, self._item_id, self._part, self._shown = events, item_id, part, shown

    def add(self, piece: str, scores: TokenScores | None = None) -> None:
        if self._shown and piece:
            self.text += piece
            if self._scores is not None:
                self._scores += scores or []
            else:
                scores = None
            self._events.post(TranscriptDelta(self._item_id, self._part, piece, scores))

    def follow(self, captions: Captions) -> None:
        """Report the stable text of live captions as it grows."""
        captions.on_change(lambda: self.add(continued(self.text, captions.stable)))
        self.add(captions.stable)

    async def complete(self, text: str, seconds: float) -> None:
        if self._shown:
            event = TranscriptCompleted(self._item_id, self._part, text, seconds, self._scores)
            await self._events.emit(event)

    async def fail(self, error: MotetError) -> None:
        if self._shown:
            await self._events.emit(TranscriptFailed(self._item_id, self._part, error))

    def stop(self) -> None:
        """Report nothing more."""
        self._shown = False


class ItemTranscription:
    """Transcribe the items of one conversation."""

    def __init__(
        self,
        bus: Bus,
        store: Store,
        admission: Admission,
        limits: ConversationLimits,
        history: History,
        events: EventSink,
    ):
        self._bus, self._store, self._admission, self._limits = bus, store, admission, limits
        self._history, self._events = history, events
        self._tasks: dict[str, asyncio.Task[str]] = {}  # by part of an item without its words
        self._running: set[asyncio.Task[str]] = set()
        self._failed: dict[str, BaseException] = {}  # by part of an item
        self._open: dict[str, Transcript] = {}  # by id of items that are not committed

    @property
    def is_quiet(self) -> bool:
        """Return True if no item awaits its transcript."""
        return not (self._running or self._open)

    def state(self) -> dict[str, WireError]:
        """Return the errors that `wait` will raise, by part of an item."""
        return {
            key: wire_error(error if isinstance(error, MotetError) else MotetError(str(error)))
            for key, error in self._failed.items()
        }

    def restore(self, state: dict[str, WireError]) -> None:
        self._failed = {key: from_wire(*error) for key, error in state.items()}

    def follow(self, item_id: str, captions: Captions) -> None:
        """Report the words of an item that is not committed yet."""
        transcript = self._open[item_id] = Transcript(self._events, item_id, 0, shown=True)
        transcript.follow(captions)

    def forget(self, item_id: str) -> None:
        """Discard the transcript of an item that will never be committed."""
        if (transcript := self._open.pop(item_id, None)) is not None:
            transcript.stop()

    async def commit(self, item_id: str, audio: PartAudio, *, rolling: bool = False) -> Item:
        """Append a user item with this audio, report it, and start its transcription.

        rolling: the oldest items are deleted where it does not fit.
        """
        item = user_audio_item(item_id)
        audio.keep(item, 0)
        self._history.make_room(item)
        for dropped in self._history.drop_oldest(item) if rolling else ():
            self.forget_errors(dropped)
        previous = self._history.insert(item)
        await self._events.emit(AudioCommitted(item, previous))
        self.begin(item, 0, audio)
        return item

    def begin(self, item: Item, part: int, audio: PartAudio) -> None:
        """Transcribe the audio of one content part of `item`; empty audio needs no model.

        Sound that replies get is transcribed only if transcripts are reported.
        """
        content = item["content"][part]
        unreported = audio.settings is None and audio.captions is None
        if unreported and SOUND in content:
            return
        if not (audio.heard and unreported) and audio.has_words:
            key = _key(item, part)
            task = self._tasks[key] = asyncio.create_task(
                self._transcribe(item, part, audio), name="transcribe"
            )
            self._running.add(task)
            task.add_done_callback(lambda task: self._end(key, task))
        else:
            content["transcript"] = ""

    def _end(self, key: str, task: asyncio.Task[str]) -> None:
        """Keep the error of a transcription that has failed until a reply waits for its words."""
        self._running.discard(task)
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, MotetError):  # without frames, which hold the audio
                error.__traceback__ = error.__cause__ = error.__context__ = None
            self._failed[key] = error

    async def wait(self, items: list[Item]) -> None:
        """Wait until the words of all these items are known, or cannot be.

        Raises the first error then; a later call raises none of these errors again. Words of sound
        that replies get are not waited for.
        """
        keys = [
            _key(item, part)
            for item in items
            for part, content in enumerate(item.get("content") or ())
            if SOUND not in content
        ]
        failed: dict[str, BaseException] = {}
        for key in keys:
            if (task := self._tasks.get(key)) is not None:
                try:
                    await asyncio.shield(task)
                except Exception as error:  # each that waits for these words raises it
                    failed[key] = error
        failed |= {key: self._failed.pop(key) for key in keys if key in self._failed}
        if failed:
            raise next(failed[key] for key in keys if key in failed)

    def forget_errors(self, item: Item) -> None:
        """Discard the errors of an item that was deleted: no reply waits for its words."""
        for part in range(len(item.get("content") or ())):
            self._failed.pop(_key(item, part), None)

    async def finish(self) -> None:
        """Wait for all transcriptions; their errors were reported."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _transcribe(self, item: Item, part: int, audio: PartAudio) -> str:
        transcript = self._open.pop(item["id"], None)
        if transcript is None:
            transcript = Transcript(
                self._events,
                item["id"],
                part,
                shown=audio.settings is not None,
                scored=audio.scored,
            )
        try:
            text = await self._text(item["id"], audio, transcript)
            self._history.set_transcript(item, part, text)
            self._tasks.pop(_key(item, part), None)
            await transcript.complete(text, audio.seconds)
            return text
        except MotetError as error:
            await transcript.fail(error)
            raise
        finally:
            transcript.stop()
            if audio.captions is not None:
                await audio.captions.close()

    async def _text(self, item_id: str, audio: PartAudio, transcript: Transcript) -> str:
        """Return the live text, or the whole audio's; it begins with what was already reported."""
        is_live = audio.captions is not None and not audio.scored
        text = await self._live(audio.captions) if audio.captions and is_live else None
        if text is None:
            on_text = (lambda piece, scores: None) if transcript.text else transcript.add
            text = await self._transcribe_audio(item_id, audio, on_text)
        transcript.add(continued(transcript.text, text))
        return transcript.text.strip() or text

    async def _live(self, captions: Captions) -> str | None:
        """Return the live captions' final text; None if they failed or timed out."""
        try:
            async with asyncio.timeout(self._limits.request_timeout):
                return await captions.settled()
        except (MotetError, TimeoutError):
            return None

    async def _transcribe_audio(
        self, item_id: str, audio: PartAudio, on_text: Callable[[str, TokenScores], object]
    ) -> str:
        settings = audio.settings or TranscriptionSettings()
        request = Transcribe(
            model=self._admission.recognizer(settings.model),
            audio=NO_AUDIO,
            language=settings.language,
            prompt=settings.prompt,
            logprobs=settings.logprobs,
            seed=new_seed(f"{item_id} words") & 0xFFFFFFFF,
            request_id=item_id,
        )
        return await transcribe_turn(
            self._bus,
            await self._store(),
            audio.pcm[: len(audio.pcm) - len(audio.pcm) % SAMPLE_BYTES],
            audio.rate,
            request,
            on_text=on_text,
            deadline=self._limits.request_timeout,
            patience=self._limits.patience,
        )


def _key(item: Item, part: int) -> str:
    return f"{item['id']}/{part}"
