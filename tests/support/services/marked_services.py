"""Run services that trace whose audio and text they get: `python -m support.services.marked_services ROLE`.

Each sample of a test's client has its speaker and position in its lowest bits, too faint to be
heard. The recognizer transcribes these marks, the language model answers with them, and the
synthesizer encodes its words in PCM. So audio or text that reaches the wrong session, repeats or is
lost shows in the transcripts.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import sys
from dataclasses import dataclass

import numpy as np

from motet_media.audio import SAMPLE_BYTES
from motet_shared.messages import (
    Audio,
    Chat,
    ModelCard,
    Recording,
    Segment,
    Speak,
    SpeechResume,
    Text,
    Transcribe,
    Usage,
)
from motet_shared.process.actor import Actor, operation, run
from motet_shared.process.config import ProcessConfig, setting
from motet_shared.text.sentences import cut
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from support.services.fake_services import FakeDecode, FakeTokenizer, words
from support.services.voice_services import FakeRecognizer

BLOCK = 6  # samples: the speaker, and its number in five digits of four bits
BITS = 4
BLOCKS_PER_MS = 24 // BLOCK
WORD = 960  # samples: 40 ms at 24 kHz
STORY = 12  # sentences of a reply


# --------------------------------------------------------------------------------------------------------------- marks
def marked(pcm: bytes, speaker: int, first: int = 0) -> bytes:
    """Mark `pcm` in whole blocks, the first of which has the number `first` of this speaker."""
    samples = np.frombuffer(
        pcm[: len(pcm) // (SAMPLE_BYTES * BLOCK) * SAMPLE_BYTES * BLOCK], "<i2"
    ).reshape(-1, BLOCK)
    numbers = np.arange(first, first + len(samples))
    digits = [
        np.full(len(samples), speaker),
        *((numbers >> BITS * place) & 15 for place in range(BLOCK - 1)),
    ]
    return ((samples & ~15) | np.stack(digits, 1)).astype("<i2").tobytes()


def read_marks(pcm: bytes) -> str:
    """Return `speaker 3 from 120 to 480`, or the error in the marks."""
    digits = np.frombuffer(pcm, "<i2").reshape(-1, BLOCK) & 15
    numbers = digits[:, 1:].astype(int) @ (1 << BITS * np.arange(BLOCK - 1))
    speakers = sorted(set(digits[:, 0].tolist()))
    if len(speakers) != 1:
        return f"speakers {speakers} in one sound"
    if not (np.diff(numbers) == 1).all():
        return f"speaker {speakers[0]} torn"
    return f"speaker {speakers[0]} from {numbers[0]} to {numbers[-1]}"


def story(heard: str) -> str:
    """Return an answer in which every word names the speaker and its position."""
    speaker = heard.split()[1]
    lines = [
        " ".join(f"S{speaker}n{line}w{word}" for word in range(6)) + "." for line in range(STORY)
    ]
    return " ".join([heard.capitalize() + ".", *lines])


def spelled(word: str) -> bytes:
    letters = word.encode()
    return struct.pack(f"<{WORD}h", *letters, *[0] * (WORD - len(letters)))


def read_words(pcm: bytes) -> list[str]:
    """Return the spoken words; the last one may be truncated."""
    samples = np.frombuffer(pcm, "<i2")
    return [
        "".join(map(chr, part[part != 0]))
        for part in np.split(samples, range(WORD, len(samples), WORD))
    ]


# ------------------------------------------------------------------------------------------------------------- services
@dataclass(frozen=True, kw_only=True)
class MarkedConfig(ProcessConfig):
    """Configure the services.

    pace: seconds per item.
    """

    pace: float = setting("seconds between two items", default=0.01, min=0.0)


class MarkedAsr(FakeRecognizer):
    """Transcribe the marks of the audio, one segment per word."""

    name = "marked-ears"

    @operation(Transcribe)
    async def transcribe(self, call: Call, request: Transcribe) -> None:
        rate, pcm = await self.sound(request)
        first = request.resume.segment + request.resume.skip if request.resume else 0
        if not first:
            await call.send(Recording(len(pcm) / SAMPLE_BYTES / rate, "en", "english"))
        for number, word in enumerate(read_marks(pcm).split()):
            if number >= first:
                await asyncio.sleep(self.config.pace)
                await call.send(Segment(number, 0, float(number), number + 1.0, " " + word))
        call.finish("stop", Usage())


class MarkedTokenizer(FakeTokenizer):
    """Answer each speaker with a story."""

    def __init__(self, config: MarkedConfig, bus: Bus):
        super().__init__(config, bus)
        self.pace = config.pace
        self.reply = _told


def _told(request: object) -> list[Text]:
    assert isinstance(request, Chat)
    return words(story(str(request.messages[-1]["content"])))


class MarkedTts(Actor):
    """Encode its text, one word per item; continues where another instance was lost."""

    role = "tts"

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="marked-voice", context=4096, voices=["alto"])]

    @operation(Speak)
    async def speak(self, call: Call, request: Speak) -> None:
        resume = request.resume or SpeechResume(0, 0, 0)
        left = [
            chunk
            for chunk in cut(request.text, begun=request.sentence > 0)
            if chunk.end > resume.text
        ]
        skip = itertools.chain([resume.skip], itertools.repeat(0))
        for number, (chunk, heard) in enumerate(zip(left, skip, strict=False)):
            spoken = chunk.text.split()
            pcm = b"".join(map(spelled, spoken))[heard * SAMPLE_BYTES :]
            for start in range(0, len(pcm), WORD * SAMPLE_BYTES):
                await asyncio.sleep(self.config.pace)
                last = start + WORD * SAMPLE_BYTES >= len(pcm)
                times = [(word, 40 * index, 40 * (index + 1)) for index, word in enumerate(spoken)]
                part, end = pcm[start : start + WORD * SAMPLE_BYTES], chunk.end if last else 0
                await call.send(
                    Audio(part, times, request.sentence + number, end, Usage(completion_tokens=1))
                )
        call.finish("stop")


ACTORS: dict[str, type[Actor]] = {
    "asr": MarkedAsr,
    "tts": MarkedTts,
    "tokenizer": MarkedTokenizer,
    "decode": FakeDecode,
}

if __name__ == "__main__":
    run(ACTORS[sys.argv[1]], MarkedConfig, sys.argv[2:])
