"""Fake speech recognition and synthesis with scripted words, for voice tests."""

from __future__ import annotations

import asyncio
import math
import struct
from typing import Any

from motet_media.audio import SAMPLE_BYTES
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import MotetError
from motet_shared.messages import (
    Audio,
    Listen,
    ModelCard,
    Partial,
    Recording,
    Segment,
    Speak,
    Transcribe,
    Usage,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.text.sentences import cut
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

ASR_MODEL, VOICE = "scripted-asr", "scripted-tts"
WORD_MS = 200  # of sound per word
_RATE = 24000


class FakeRecognizer(Actor):
    """Fake a recognizer that receives audio files."""

    role = "asr"
    name: str

    def __init__(self, config: Any, bus: Bus):
        super().__init__(config, bus)
        self._store = BlobStore(bus.instance)

    async def warm(self) -> None:
        await self._store.start()

    async def close(self) -> None:
        await self._store.close()

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=self.name, context=0, accepts_prompt=True)]

    async def sound(self, request: Transcribe) -> tuple[int, bytes]:
        """Return rate and PCM of the WAV file to transcribe."""
        data = bytes(await self._store.get(request.audio))
        return struct.unpack_from("<I", data, 24)[0], data[44:]


class ScriptedAsr(FakeRecognizer):
    """Return the next entry of `script`, one segment per line, for any audio, and record the audio."""

    name = ASR_MODEL

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.script: list[str] = []
        self.heard: list[tuple[int, bytes]] = []  # (rate, PCM)
        self.requests: list[Transcribe] = []
        self.error: MotetError | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()

    @operation(Transcribe)
    async def transcribe(self, call: Call, request: Transcribe) -> None:
        self.requests.append(request)
        rate, pcm = await self.sound(request)
        self.heard.append((rate, pcm))
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        await call.send(Recording(len(pcm) / SAMPLE_BYTES / rate, "en", "english"))
        for number, line in enumerate(self.script.pop(0).split("\n") if self.script else []):
            await call.send(Segment(number, 0, float(number), number + 1.0, " " + line))
        call.finish("stop", Usage())


class LiveAsr(ScriptedAsr):
    """Understand the first of `script` whenever it hears live, a word more with every piece of sound."""

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=ASR_MODEL, context=0, live=True)]

    @operation(Listen)
    async def listen(self, call: Call, request: Listen) -> None:
        line, heard = self.script[0].split(), 0
        async for data in call.received():
            heard += len(data)
            known = line[: heard // 9600]
            await call.send(
                Partial(
                    "".join(f" {word}" for word in known[:-1]), "".join(f" {w}" for w in known[-1:])
                )
            )
        await call.send(Segment(0, 0, 0.0, 1.0, "".join(f" {word}" for word in line)))
        call.finish("stop")


class ScriptedTts(Actor):
    """Return a tone of 200 ms per word, one word per item, with exact times.

    pace: seconds between items.
    """

    role = "tts"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.requests: list[Speak] = []
        self.pace = 0.0
        self.error: MotetError | None = None
        self.cancelled = 0

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=VOICE, context=4096, voices=["alto", "bass"])]

    @operation(Speak)
    async def speak(self, call: Call, request: Speak) -> None:
        self.requests.append(request)
        try:
            await self._say(call, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        words = len(request.text.split())
        call.finish("stop", Usage(prompt_tokens=words, completion_tokens=words))

    async def _say(self, call: Call, request: Speak) -> None:
        at = 0
        for number, chunk in enumerate(cut(request.text, begun=request.sentence > 0)):
            words = chunk.text.split()
            times = [
                (word, at + i * WORD_MS, at + (i + 1) * WORD_MS) for i, word in enumerate(words)
            ]
            at += len(words) * WORD_MS
            for index in range(len(words)):
                if self.error is not None:
                    raise self.error
                last = index == len(words) - 1
                told: Any = times if index == 0 or last else []
                usage = (
                    Usage(prompt_tokens=len(words), completion_tokens=len(words)) if last else None
                )
                end = chunk.end if last else 0
                await call.send(Audio(tone(WORD_MS), told, request.sentence + number, end, usage))
                await asyncio.sleep(self.pace)


def tone(ms: int, rate: int = _RATE) -> bytes:
    """Return 440 Hz at a quarter of full scale."""
    count = ms * rate // 1000
    return b"".join(
        struct.pack("<h", round(8000 * math.sin(2 * math.pi * 440 * i / rate)))
        for i in range(count)
    )


def tone_ms(pcm: bytes, rate: int = _RATE) -> int:
    return len(pcm) // SAMPLE_BYTES * 1000 // rate
