"""Speakers: who speaks in a sound file, and a transcript that says so.

    asked = Diarization()
    async with aclosing(transcribe_speakers(bus, store, data, request, asked, hearing)) as parts:
        async for part in parts:
            print(f"{part.speaker}: {part.segment.text}")

A voice activity service marks the speech; while the first window is transcribed, a speakers service tells how each
stretch of it sounds, far faster than real time. If a service dies, another one goes on with what is left. Leaving a
generator early is a remote cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import groupby
from string import ascii_uppercase
from typing import NamedTuple

import msgspec

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.discovery import Directory
from motet_shared.errors import Unavailable
from motet_shared.messages import Segment, Survey, Transcribe, Voice, Voices

from .diarize import Known, Span, Turn, identify, turns, who_says, windows
from .files import Bytes, lent
from .instances import served
from .moves import Moved, Moves
from .survey import survey
from .transcribe import NO_AUDIO, Hearing, transcribe

ROLE = "speakers"


@dataclass(frozen=True, kw_only=True)
class Diarization:
    """How speakers are told apart: how speech is found, and the sounds of those whose names are known."""

    speech: Survey = field(default_factory=lambda: Survey(audio=NO_AUDIO))
    known: tuple[tuple[str, Bytes], ...] = ()
    model: str = ""  # empty: the one that is served


class Part(NamedTuple):
    """A stretch of text that one person says. The segment's id counts these parts."""

    segment: Segment
    speaker: str


class Heard(NamedTuple):
    """How stretches of a file sound, in order, and from which cosine on they are one person's."""

    vectors: list[array[float]]
    alike: float


def speakers_model(directory: Directory, name: str = "") -> str:
    """The model that tells speakers apart, by default the one that is served. Unavailable if there is none."""
    names = [name] if name else list(served(directory, ROLE))
    if not names:
        raise Unavailable("no speakers service is ready; start one: motet up --speakers")
    return names[0]


async def voices(
    bus: Bus, store: BlobStore, data: Bytes, request: Voices, *, deadline: float | None = None, patience: float = 5.0
) -> Heard:
    """How each of the request's spans of the file `data` sounds. Another instance goes on where one died."""
    model = speakers_model(bus.directory, request.model)
    vectors: list[array[float]] = []
    alike, wanted = 1.0, len(request.spans) or 1
    what = "comparison of the speakers"
    moves = Moves(bus, ROLE, model, Moved(), lambda: len(vectors), patience=patience, deadline=deadline, what=what)
    while len(vectors) < wanted:
        async with moves as instance, lent(store, data, instance) as ref:
            left = request.spans[len(vectors) :]
            asked = msgspec.structs.replace(request, audio=ref, spans=left, model=model)
            async with bus.open(ROLE, asked, instance=instance, deadline=moves.left()) as stream:
                async for item in stream:
                    if isinstance(item, Voice):
                        vectors.append(array("f", item.vector))
                        alike = item.alike
    return Heard(vectors, alike)


async def diarize(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    speech: Sequence[Span],
    asked: Diarization,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> tuple[list[Turn], dict[int, str]]:
    """Who speaks when in the file `data`, and the names of those who are known. `speech`: in order and apart."""
    if not speech:
        return [], {}

    async def listen(sound: Bytes, spans: list[Span]) -> Heard:
        request = Voices(audio=NO_AUDIO, spans=spans, model=asked.model)
        return await voices(bus, store, sound, request, deadline=deadline, patience=patience)

    heard = await listen(data, windows(speech))
    known = [Known(name, (await listen(sound, [])).vectors[0]) for name, sound in asked.known]
    found = await asyncio.to_thread(turns, speech, heard.vectors, heard.alike)
    return found, identify(found, speech, heard.vectors, known, heard.alike)


async def transcribe_speakers(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: Transcribe,
    asked: Diarization,
    outcome: Hearing | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Part, None]:
    """Yield what is said in the file `data` as it becomes final, each part with its speaker.

    Speakers whose sound was given have their names, the others A, B, … in the order in which they appear.
    """
    began = bus.clock.now()
    spoken = await survey(bus, store, data, asked.speech, deadline=deadline, patience=patience)
    left = None if deadline is None else deadline - (bus.clock.now() - began)
    work = diarize(bus, store, data, spoken.spans, asked, deadline=left, patience=patience)
    telling = asyncio.create_task(work, name="diarize")
    hearing = msgspec.structs.replace(request, words=True, speech=spoken.spans)
    segments = transcribe(bus, store, data, hearing, outcome, deadline=left, patience=patience)
    try:
        async with aclosing(segments):
            script: _Script | None = None
            async for segment in segments:
                script = script or _Script(*await telling)
                for part in script.parts(segment):
                    yield part
            await telling
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


class _Script:
    """Segments of text with the names of those who say them."""

    def __init__(self, turns: list[Turn], known: dict[int, str]):
        self._turns = turns
        self._names = dict(known)
        self._letters = letters(set(known.values()))
        self._count = 0

    def parts(self, segment: Segment) -> Iterator[Part]:
        """A segment by its speakers; the text of all parts together is the segment's."""
        words = segment.words or [(segment.text, segment.start, segment.end)]
        for who, said in groupby(words, lambda word: who_says(self._turns, word[1], word[2])):
            own = list(said)
            text, start, end = "".join(word[0] for word in own), own[0][1], own[-1][2]
            part = msgspec.structs.replace(segment, id=self._count, start=start, end=end, text=text, words=own)
            self._count += 1
            if who not in self._names:
                self._names[who] = next(self._letters)
            yield Part(part, self._names[who])


def letters(taken: set[str]) -> Iterator[str]:
    """A, B, … Z, AA, AB, …, without those that are taken."""
    length = 1
    while True:
        for number in range(26**length):
            name = "".join(ascii_uppercase[number // 26**place % 26] for place in reversed(range(length)))
            if name not in taken:
                yield name
        length += 1
