"""Transcribe: a sound file in, final segments out, with failover between recognizers.

    outcome = Hearing()
    request = Transcribe(model="pocket-asr", audio=NO_AUDIO)
    async with aclosing(transcribe(bus, store, data, request, outcome)) as segments:
        async for segment in segments:
            print(segment.text, end="", flush=True)
    print(outcome.duration, outcome.language)

If the recognizer dies, another one continues at the window that was not complete: no segment is
lost or repeated. With `speech`, a voice activity service first finds the speech: the file is cut
there, and long silences are skipped. Without one the audio level decides. The file lies in `store`
only while an instance fetches it. Leaving the generator early is a remote cancel; `aclosing` makes
that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import cast

import msgspec

from motet_pipelines.answers import Answers
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import (
    BlobRef,
    End,
    FindSpeech,
    Recording,
    Segment,
    Transcribe,
    TranscriptionResume,
)
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import RETRYABLE, Failover, StreamMoves

from .file_speech import find_speech
from .sound_files import Bytes, lent

ROLE = "asr"
NO_AUDIO = BlobRef("shm", "", "", 0)  # placeholder in a request whose file is passed separately

_batches: msgspec.msgpack.Decoder[list[Segment | Recording]] = msgspec.msgpack.Decoder(
    list[Segment | Recording]
)
_ends: msgspec.msgpack.Decoder[End | None] = msgspec.msgpack.Decoder(End | None)


@dataclass(slots=True, kw_only=True)
class TranscriptionOutcome(StreamMoves):
    """Facts about a recording besides its text; complete once the generator has ended."""

    duration: float = 0.0
    language: str = ""
    language_name: str = ""
    end: End | None = None


async def transcribe(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: Transcribe,
    outcome: TranscriptionOutcome | None = None,
    *,
    speech: FindSpeech | None = None,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Segment, None]:
    """Yield the segments of the file `data` as they become final.

    `speech`: how speech is found; None: as the request says. `deadline`: seconds for everything.
    `patience`: seconds without progress, in which an instance may appear or restart, before the
    last retryable error is raised. Other errors are raised at once, Overloaded too unless there was
    text.
    """
    outcome = outcome or TranscriptionOutcome()
    progress = _Progress()
    moves = Failover(
        bus,
        ROLE,
        request.model,
        outcome,
        lambda: progress.count,
        patience=patience,
        deadline=deadline,
        what="transcription",
    )
    if speech is not None:
        spans = await _spans(bus, store, data, speech, moves.left())
        request = msgspec.structs.replace(request, speech=spans)
    answers = Answers(request, _batches, _ends)
    while (batch := await answers.recorded()) is not None:
        for segment in progress.take(batch, outcome):
            yield segment
    if answers.end is not None:
        outcome.end = answers.end
        return
    async with answers.live():
        while True:
            async with moves as instance, lent(store, data, instance) as ref:
                asked = msgspec.structs.replace(
                    request, audio=ref, resume=progress.resume(outcome.language)
                )
                async with bus.open(
                    ROLE, asked, instance=instance, deadline=moves.left()
                ) as stream:
                    batches = cast(AsyncIterator[list[Segment | Recording]], stream.batches())
                    async for batch in batches:
                        await answers.record(batch)
                        for segment in progress.take(batch, outcome):
                            yield segment
                    await answers.finish(stream.end)
                    outcome.end = stream.end
                    return


async def _spans(
    bus: Bus, store: BlobStore, data: Bytes, request: FindSpeech, deadline: float | None
) -> list[tuple[float, float]] | None:
    """Return the spans of speech, or None if no voice activity service is available."""
    try:
        found = await find_speech(
            bus, store, data, request, deadline=deadline, patience=0.0, only_if_ready=True
        )
    except RETRYABLE:
        return None
    return found.spans


class _Progress:
    """Track how far the segments have come, in the recognizer's terms."""

    def __init__(self) -> None:
        self.count = 0
        self._window = 0
        self._first = 0  # id of the window's first segment

    def take(
        self, batch: list[Segment | Recording], outcome: TranscriptionOutcome
    ) -> Iterator[Segment]:
        """Yield the segments of a batch, and note what else it says in `outcome`."""
        for item in batch:
            if isinstance(item, Segment):
                if item.window != self._window:
                    self._window, self._first = item.window, item.id
                self.count = item.id + 1
                yield item
            elif isinstance(item, Recording):
                outcome.duration = item.duration
                outcome.language, outcome.language_name = item.language, item.language_name

    def resume(self, language: str) -> TranscriptionResume | None:
        if not self.count:
            return None
        return TranscriptionResume(self._window, self._first, self.count - self._first, language)
