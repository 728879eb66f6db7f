"""Sounds that repeat themselves, which Whisper's rule hears again at higher temperatures: one transcript each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from motet_asr.config import AsrConfig
from motet_asr.service import Asr
from motet_pipelines.voice.transcribe import NO_AUDIO, transcribe
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Segment, Transcribe
from motet_shared.testing import memory_buses, running, settle
from support.media.sound_files import RATE, encoded

POCKET = Path(__file__).parents[2] / "models" / "pocket-asr"


def chirping(seconds: float) -> bytes:
    """A WAV file of the same rising tone over and over."""
    time = np.arange(round(seconds * RATE)) / RATE
    sound = 0.4 * np.sin(2 * np.pi * (500 + 300 * (time % 0.7)) * time)
    return encoded(sound.astype(np.float32), "wav", "pcm_s16le")


@pytest.mark.parametrize("count", [1, 3])
async def test_a_sound_has_one_transcript_at_temperature_0(count: int) -> None:
    """Seeds differ as those that the gateway draws for each request. count: requests side by side, in one batch."""
    sound = chirping(8.0)
    async with memory_buses("gateway", "asr") as (bus, other):
        asr = Asr(AsrConfig(model=str(POCKET), threads=1, name="ears"), other)
        async with running(asr), BlobStore(bus.instance, 16 << 20) as store:
            await settle()

            async def heard(seed: int) -> list[tuple[str, float]]:
                request = Transcribe(model="ears", audio=NO_AUDIO, language="en", seed=seed)
                found = [item async for item in transcribe(bus, store, sound, request)]
                return [
                    (item.text, item.temperature) for item in found if isinstance(item, Segment)
                ]

            first = await heard(1)
            again = await asyncio.gather(*(heard(seed) for seed in range(2, 2 + count)))
    assert first
    assert any(temperature > 0 for _, temperature in first)
    assert again == [first] * count
