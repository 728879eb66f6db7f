"""Fake recognition, synthesis and drawing that go on where a request says its caller is, as the real ones do."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from motet_media.audio import SAMPLE_BYTES
from motet_shared.messages import (
    Audio,
    Checkpoint,
    DenoisingProgress,
    Draw,
    EmbedSpeakers,
    FindSpeech,
    ModelCard,
    Picture,
    Recording,
    Segment,
    Speak,
    SpeakerEmbedding,
    SpeechSpans,
    Transcribe,
    Usage,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.text.sentences import cut
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.epochs import Epoch
from support.services.drawing_services import FakeDiffusion
from support.services.voice_services import ASR_MODEL, FakeRecognizer, ScriptedTts

PACE = 0.002  # seconds between items
STEPS = 24
WINDOWS, PER_WINDOW = 6, 4  # segments


class ResumingTts(ScriptedTts):
    """Say each word as 100 samples of its own."""

    async def _say(self, call: Call, request: Speak) -> None:
        resume, at = request.resume, 0
        text, skip = (0, 0) if resume is None else (resume.text, resume.skip)
        for number, chunk in enumerate(cut(request.text, begun=request.sentence > 0)):
            words = chunk.text.split()
            times = [(word, at + 4 * i, at + 4 * i + 4) for i, word in enumerate(words)]
            at += 4 * len(words)
            if chunk.end <= text:
                continue
            pcm = b"".join([(word.encode() * 2 * 100)[: 100 * SAMPLE_BYTES] for word in words])
            pcm, skip = pcm[skip * SAMPLE_BYTES :], 0
            parts = [pcm[i : i + 150] for i in range(0, len(pcm), 150)] or [b""]
            for index, part in enumerate(parts):
                is_last = index == len(parts) - 1
                usage = Usage(prompt_tokens=len(words), completion_tokens=9) if is_last else None
                end = chunk.end if is_last else 0
                await call.send(Audio(part, times, request.sentence + number, end, usage))
                await asyncio.sleep(PACE)


def epochs_of_speech(monkeypatch: pytest.MonkeyPatch) -> list[Epoch]:
    """Return a list that gets the epoch of each call of a ResumingTts from now on."""
    epochs: list[Epoch] = []
    say = ResumingTts._say

    async def noting(tts: ResumingTts, call: Call, request: Speak) -> None:
        epochs.append(call.epoch)
        await say(tts, call, request)

    monkeypatch.setattr(ResumingTts, "_say", noting)
    return epochs


class ResumingAsr(FakeRecognizer):
    name = ASR_MODEL

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.resumed = 0

    @operation(Transcribe)
    async def transcribe(self, call: Call, request: Transcribe) -> None:
        resume = request.resume
        first, skip = (0, 0) if resume is None else (resume.window, resume.skip)
        self.resumed += resume is not None
        await self.sound(request)
        await call.send(Recording(60.0, request.language, "english"))
        for window in range(first, WINDOWS):
            for index in range(skip, PER_WINDOW):
                number = window * PER_WINDOW + index
                words = [(f" w{number}", number * 2.0, number * 2.0 + 1)]
                text = f" w{number}"
                await call.send(
                    Segment(number, window, number * 2.0, number * 2.0 + 1, text, words=words)
                )
                await asyncio.sleep(PACE)
            skip = 0
        call.finish("stop", Usage())


class FakeVad(Actor):
    role = "vad"

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="silero-vad", context=0)]

    @operation(FindSpeech)
    async def find(self, call: Call, request: FindSpeech) -> None:
        await asyncio.sleep(PACE)
        await call.send(SpeechSpans([(0.0, 20.0), (24.0, 60.0)], 60.0))
        call.finish("stop")


class FakeSpeakers(Actor):
    role = "speakers"

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="fake-speakers", context=0)]

    @operation(EmbedSpeakers)
    async def embed(self, call: Call, request: EmbedSpeakers) -> None:
        for start, _ in request.spans:
            vector = array("f", (1.0, 0.0) if start < 22 else (0.0, 1.0))
            await call.send(SpeakerEmbedding(vector.tobytes(), 0.5))
            await asyncio.sleep(PACE / 4)
        call.finish("stop")


class ResumingDiffusion(FakeDiffusion):
    """Send an estimate at every sixth step, and a checkpoint at every fifth."""

    def __init__(self, bus: Bus):
        super().__init__(bus)
        self.resumed: list[int] = []

    @operation(Draw)
    async def draw(self, call: Call, request: Draw) -> None:
        done = 0 if request.resume is None else request.resume.step
        if request.resume is not None:
            assert request.resume.data == b"latents %d" % done
            self.resumed.append(done)
        for step in range(done + 1, STEPS + 1):
            preview = b"" if step % 6 else b"estimate %d" % step
            checkpoint = None if step % 5 else Checkpoint(step, b"latents %d" % step)
            await call.send(DenoisingProgress(step, STEPS, preview, checkpoint))
            await asyncio.sleep(PACE)
        file = b"picture of %d" % request.seed
        ref = await self.store.put_async(file, readers=(call.caller,))
        await call.send(Picture(ref, 8, 8, STEPS))
        call.finish("stop")
