"""Transcription: a sound file in, final segments out, on whichever recognizer is alive.

    outcome = Hearing()
    request = Transcribe(model="pocket-asr", audio=NO_AUDIO)
    async with aclosing(transcribe(bus, store, data, request, outcome)) as segments:
        async for segment in segments:
            print(segment.text, end="", flush=True)
    print(outcome.duration, outcome.language)

If the recognizer dies, another one goes on at the window that was not complete: no segment is lost or repeated. The
file lies in `store` only while an instance fetches it. Leaving the generator early is a remote cancel; `aclosing`
makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.errors import DeadlineExceeded, Overloaded, StreamBroken, Unavailable
from motet_shared.messages import BlobRef, End, HearingResume, Recording, Segment, Transcribe
from motet_shared.stream import Stream

from .instances import pick

ROLE = "asr"
MOVES = 6  # of one file: bounds what a file that kills its recognizers can do
PAUSE = 0.05  # seconds between two attempts without progress
NO_AUDIO = BlobRef("shm", "", "", 0)  # in a request whose file comes beside it


@dataclass(slots=True)
class Hearing:
    """What there is to know of a recording besides its text; complete once the generator has ended."""

    duration: float = 0.0
    language: str = ""
    language_name: str = ""
    end: End | None = None
    instance: str | None = None
    moves: int = 0


async def transcribe(
    bus: Bus,
    store: BlobStore,
    data: bytes | memoryview,
    request: Transcribe,
    outcome: Hearing | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Segment, None]:
    """Yield the segments of the file `data` as they become final.

    `deadline`: seconds for all of it. `patience`: seconds without progress, in which an instance may appear or restart,
    before the last retryable error is raised. Other errors are raised at once, Overloaded too unless there was text.
    """
    outcome = outcome or Hearing()
    now = bus.clock.now
    expires = None if deadline is None else now() + deadline
    give_up = now() + patience
    progress = _Progress()
    known = 0
    while True:
        try:
            outcome.instance = await pick(bus, ROLE, request.model, avoid=outcome.instance, patience=give_up - now())
            ref = await store.put_async(data, readers=[outcome.instance], ttl=60.0)
            try:
                asked = msgspec.structs.replace(request, audio=ref, resume=progress.resume(outcome.language))
                left = None if expires is None else _left(expires, now())
                async with bus.open(ROLE, asked, instance=outcome.instance, deadline=left) as stream:
                    async for segment in _segments(stream, outcome, progress):
                        yield segment
                    outcome.end = stream.end
                    return
            finally:
                store.drop(ref)
        except (StreamBroken, Unavailable, Overloaded) as error:
            if progress.count > known:
                give_up, known = now() + patience, progress.count
            outcome.moves += isinstance(error, StreamBroken)
            if now() >= give_up or outcome.moves > MOVES or (isinstance(error, Overloaded) and not known):
                raise
        await bus.clock.sleep(PAUSE)


class _Progress:
    """How far the segments have come, in the recognizer's terms."""

    def __init__(self) -> None:
        self.count = 0
        self._window = 0
        self._first = 0  # id of the window's first segment

    def note(self, segment: Segment) -> None:
        if segment.window != self._window:
            self._window, self._first = segment.window, segment.id
        self.count = segment.id + 1

    def resume(self, language: str) -> HearingResume | None:
        if not self.count:
            return None
        return HearingResume(self._window, self._first, self.count - self._first, language)


async def _segments(stream: Stream, outcome: Hearing, progress: _Progress) -> AsyncGenerator[Segment, None]:
    async for batch in stream.batches():
        for item in batch:
            if isinstance(item, Segment):
                progress.note(item)
                yield item
            elif isinstance(item, Recording):
                outcome.duration = item.duration
                outcome.language, outcome.language_name = item.language, item.language_name


def _left(expires: float, now: float) -> float:
    if expires <= now:
        raise DeadlineExceeded("the deadline passed before the transcription was complete")
    return expires - now
