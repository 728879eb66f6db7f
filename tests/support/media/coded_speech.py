"""Encode words in the samples of audio, for services that decode them: transcripts are then exact."""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import defaultdict

import numpy as np

from motet_media.audio import pcm_bytes
from motet_shared.errors import BadRequest
from motet_shared.messages import (
    Detect,
    Listen,
    ModelCard,
    Partial,
    PredictTurnEnd,
    Recording,
    Segment,
    Transcribe,
    TurnEnd,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_vad.edges import Edges
from support.services.voice_services import FakeRecognizer

RATE = 24000
ASR_MODEL = "coded-asr"
WORD_MS, BREATH_MS, FRAME_MS = 200, 40, 32
_BREATH = 1  # a sample that is voice but no word
_codes: defaultdict[str, int] = defaultdict(itertools.count(100).__next__)


def say(text: str, rate: int = RATE) -> bytes:
    """Return the words of `text`, 200 ms each."""
    return b"".join(
        _tone(_codes[word], WORD_MS - BREATH_MS, rate) + cough(BREATH_MS, rate)
        for word in text.split()
    )


def cough(ms: float, rate: int = RATE) -> bytes:
    """Return voice without words."""
    return _tone(_BREATH, ms, rate)


def quiet(ms: float, rate: int = RATE) -> bytes:
    return bytes(pcm_bytes(ms, rate))


def _tone(value: int, ms: float, rate: int) -> bytes:
    return struct.pack("<h", value) * (pcm_bytes(ms, rate) // 2)


def words_in(pcm: bytes, rate: int = RATE) -> list[str]:
    """Return the words of samples; a truncated word counts as none."""
    samples = np.frombuffer(pcm[: len(pcm) // 2 * 2], "<i2")
    names = {code: word for word, code in _codes.items()}
    found = []
    for value, run in itertools.groupby(samples.tolist()):
        if value in names and len(list(run)) >= (WORD_MS - BREATH_MS) / 2 * rate / 1000:
            found.append(names[value])
    return found


class CodedVad(Actor):
    """Detect every non-zero sample as speech.

    finished: end-of-turn probabilities by text; None: no end-of-turn model.
    """

    role = "vad"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.finished: dict[str, float] | None = None
        self.judged: list[str] = []
        self.heard_ms = 0

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="silero-vad", context=0)]

    @operation(Detect)
    async def detect(self, call: Call, request: Detect) -> None:
        edges, rest, self.heard_ms = Edges(request), b"", 0
        size = pcm_bytes(FRAME_MS, request.sample_rate)
        async for data in call.received():
            rest += data
            while len(rest) >= size:
                frame, rest, self.heard_ms = rest[:size], rest[size:], self.heard_ms + FRAME_MS
                edge = edges.frame(float(any(frame)), self.heard_ms - FRAME_MS, self.heard_ms)
                if edge is not None:
                    await call.send(edge)
        call.finish("stop")

    @operation(PredictTurnEnd)
    async def predict_turn_end(self, call: Call, request: PredictTurnEnd) -> None:
        self.judged.append(request.text)
        if self.finished is not None:
            await call.send(TurnEnd(self.finished[request.text]))
        call.finish("stop")


class CodedAsr(FakeRecognizer):
    """Transcribe live every `every` ms; only the last word may still change.

    Waits for `go_on` before it starts.
    """

    name = ASR_MODEL

    def __init__(self, bus: Bus, *, live: bool = True, every: int = 100):
        super().__init__(None, bus)
        self.live, self.every = live, every
        self.listens: list[Listen] = []
        self.transcribes: list[Transcribe] = []
        self.heard = b""  # by the last one
        self.deaf: dict[str, str] = {}  # words that are taken for others
        self.tires_at: int | None = None  # words at which it refuses to hear live any longer
        self.go_on = asyncio.Event()
        self.go_on.set()

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=self.name, context=0, live=self.live, accepts_prompt=True)]

    @operation(Listen)
    async def listen(self, call: Call, request: Listen) -> None:
        self.listens.append(request)
        pcm, known = b"", 0
        async for data in call.received():
            pcm += data
            self.heard = pcm
            if len(pcm) - known >= pcm_bytes(self.every, request.sample_rate):
                known = len(pcm)
                await self.go_on.wait()
                words = self._words(pcm, request.sample_rate)
                if self.tires_at is not None and len(words) >= self.tires_at:
                    raise BadRequest("too many words")
                await call.send(Partial(_text(words[:-1]), _text(words[-1:])))
        await self.go_on.wait()
        await call.send(Segment(0, 0, 0.0, 1.0, _text(self._words(pcm, request.sample_rate))))
        call.finish("stop")

    @operation(Transcribe)
    async def transcribe(self, call: Call, request: Transcribe) -> None:
        self.transcribes.append(request)
        rate, pcm = await self.sound(request)
        await self.go_on.wait()
        await call.send(Recording(len(pcm) / 2 / rate, "en", "english"))
        for number, word in enumerate(self._words(pcm, rate)):
            await call.send(Segment(number, 0, float(number), number + 1.0, f" {word}"))
        call.finish("stop")

    def _words(self, pcm: bytes, rate: int) -> list[str]:
        return [self.deaf.get(word, word) for word in words_in(pcm, rate)]


def _text(words: list[str]) -> str:
    return "".join(f" {word}" for word in words)
