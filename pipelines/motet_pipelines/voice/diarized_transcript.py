"""Transcribe a sound file with the speaker of each part.

    asked = Diarization()
    async with aclosing(transcribe_speakers(bus, store, data, request, asked, hearing)) as parts:
        async for part in parts:
            print(f"{part.speaker}: {part.segment.text}")

A voice activity service marks the speech; while the first window is transcribed, a speakers service
returns a voice vector for each span of it, far faster than real time. If a service dies, another
instance continues with what is left. Leaving a generator early is a remote cancel; `aclosing` makes
that prompt.
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

from motet_pipelines.answers import Answers
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Unavailable
from motet_shared.messages import EmbedSpeakers, FindSpeech, Segment, SpeakerEmbedding, Transcribe
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import Directory
from motet_shared.wire.failover import Failover, StreamMoves
from motet_shared.wire.instances import served

from .diarize import Known, Span, Turn, identify, speaker_at, turns, windows
from .file_speech import find_speech
from .sound_files import Bytes, lent
from .transcribe import NO_AUDIO, TranscriptionOutcome, transcribe

ROLE = "speakers"
_embeddings = msgspec.msgpack.Decoder(SpeakerEmbedding)
_ends = msgspec.msgpack.Decoder(bool)


@dataclass(frozen=True, kw_only=True)
class Diarization:
    """Configure a diarization: the detection of speech, and audio of known speakers."""

    speech: FindSpeech = field(default_factory=lambda: FindSpeech(audio=NO_AUDIO))
    known: tuple[tuple[str, Bytes], ...] = ()
    model: str = ""  # empty: the first one that is served


class Part(NamedTuple):
    """Text that one speaker says. The segment's id counts these parts."""

    segment: Segment
    speaker: str


class VoiceVectors(NamedTuple):
    """Voice vectors of spans of a file, in order, and the cosine from which two match."""

    vectors: list[array[float]]
    alike: float


def speakers_model(directory: Directory, name: str = "") -> str:
    """Return the speakers model, by default the first one served.

    Raises Unavailable if there is none.
    """
    names = [name] if name else list(served(directory, ROLE))
    if not names:
        raise Unavailable("no speakers service is ready; start one: motet up --speakers")
    return names[0]


async def voices(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: EmbedSpeakers,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> VoiceVectors:
    """Return the voice vectors of the request's spans of the file `data`, with failover."""
    model = speakers_model(bus.directory, request.model)
    vectors: list[array[float]] = []
    alike, wanted = 1.0, len(request.spans) or 1
    what = "comparison of the speakers"
    moves = Failover(
        bus,
        ROLE,
        model,
        StreamMoves(),
        lambda: len(vectors),
        patience=patience,
        deadline=deadline,
        what=what,
    )
    answers = Answers(request, _embeddings, _ends)
    while (known := await answers.recorded()) is not None:
        vectors.append(array("f", known.vector))
        alike = known.threshold
    async with answers.live():
        while len(vectors) < wanted:
            async with moves as instance, lent(store, data, instance) as ref:
                left = request.spans[len(vectors) :]
                asked = msgspec.structs.replace(request, audio=ref, spans=left, model=model)
                async with bus.open(
                    ROLE, asked, instance=instance, deadline=moves.left()
                ) as stream:
                    async for item in stream:
                        if isinstance(item, SpeakerEmbedding):
                            await answers.record(item)
                            vectors.append(array("f", item.vector))
                            alike = item.threshold
    return VoiceVectors(vectors, alike)


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
    """Return the turns in the file `data`, and the names of known speakers.

    `speech`: spans in seconds, in order and disjoint.
    """
    if not speech:
        return [], {}

    async def vectors_of(sound: Bytes, spans: list[Span]) -> VoiceVectors:
        request = EmbedSpeakers(audio=NO_AUDIO, spans=spans, model=asked.model)
        return await voices(bus, store, sound, request, deadline=deadline, patience=patience)

    result = await vectors_of(data, windows(speech))
    known = [Known(name, (await vectors_of(sound, [])).vectors[0]) for name, sound in asked.known]
    found = await asyncio.to_thread(turns, speech, result.vectors, result.alike)
    return found, identify(found, speech, result.vectors, known, result.alike)


async def transcribe_speakers(
    bus: Bus,
    store: BlobStore,
    data: Bytes,
    request: Transcribe,
    asked: Diarization,
    outcome: TranscriptionOutcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[Part, None]:
    """Yield the text of the file `data` as it becomes final, each part with its speaker.

    Speakers whose audio was given have their names, the others A, B, … in order of appearance.
    """
    began = bus.clock.now()
    speech = await find_speech(bus, store, data, asked.speech, deadline=deadline, patience=patience)
    left = None if deadline is None else deadline - (bus.clock.now() - began)
    work = diarize(bus, store, data, speech.spans, asked, deadline=left, patience=patience)
    diarizing = asyncio.create_task(work, name="diarize")
    transcription = msgspec.structs.replace(request, words=True, speech=speech.spans)
    segments = transcribe(
        bus, store, data, transcription, outcome, deadline=left, patience=patience
    )
    try:
        async with aclosing(segments):
            names: _SpeakerNames | None = None
            async for segment in segments:
                names = names or _SpeakerNames(*await diarizing)
                for part in names.parts(segment):
                    yield part
            await diarizing
    finally:
        diarizing.cancel()
        await asyncio.gather(diarizing, return_exceptions=True)


class _SpeakerNames:
    """Attribute segments of text to named speakers."""

    def __init__(self, turns: list[Turn], known: dict[int, str]):
        self._turns = turns
        self._names = dict(known)
        self._letters = letters(set(known.values()))
        self._count = 0

    def parts(self, segment: Segment) -> Iterator[Part]:
        """Yield a segment by its speakers; the texts of all parts joined are the segment's text."""
        words = segment.words or [(segment.text, segment.start, segment.end)]
        for speaker, run in groupby(words, lambda word: speaker_at(self._turns, word[1], word[2])):
            own = list(run)
            text, start, end = "".join(word[0] for word in own), own[0][1], own[-1][2]
            part = msgspec.structs.replace(
                segment, id=self._count, start=start, end=end, text=text, words=own
            )
            self._count += 1
            if speaker not in self._names:
                self._names[speaker] = next(self._letters)
            yield Part(part, self._names[speaker])


def letters(taken: set[str]) -> Iterator[str]:
    """Yield A, B, … Z, AA, AB, …, without the taken ones."""
    length = 1
    while True:
        for number in range(26**length):
            name = "".join(
                ascii_uppercase[number // 26**place % 26] for place in reversed(range(length))
            )
            if name not in taken:
                yield name
        length += 1
