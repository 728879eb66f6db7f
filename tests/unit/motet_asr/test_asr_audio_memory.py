"""Decoded sound in memory: as much as is allowed, and nothing for those who have left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from motet_asr.config import AsrConfig
from motet_asr.transcription import audio_memory
from motet_asr.transcription.audio_memory import AudioMemory
from motet_asr.transcription.windows import FRAME, levels
from motet_shared.errors import BadRequest, ConfigError, Overloaded
from support.checkpoints.asr_checkpoints import RATE, noise, tiny_moonshine, wav

SECOND = 4 * RATE  # bytes


async def test_it_is_held_as_long_as_it_is_used() -> None:
    memory, sound = AudioMemory(10 * SECOND), noise(3.0)
    async with memory.reading(wav(sound), 60.0) as one, memory.reading(wav(sound), 60.0) as two:
        assert np.array_equal(one, two)
        assert one.dtype == np.float32
        assert memory.held == 6 * SECOND
    assert memory.held == 0


async def test_what_does_not_fit_is_refused_as_overload() -> None:
    memory = AudioMemory(5 * SECOND)
    async with memory.reading(wav(noise(3.0)), 60.0):
        with pytest.raises(Overloaded, match="audio_memory"):
            async with memory.reading(wav(noise(3.0)), 60.0):
                pass
        assert memory.held == 3 * SECOND
        async with memory.reading(wav(noise(2.0)), 60.0):
            assert memory.held == 5 * SECOND
    with pytest.raises(BadRequest, match="max_audio"):
        async with memory.reading(wav(noise(3.0)), 2.0):
            pass
    assert memory.held == 0


async def test_who_leaves_ends_the_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def endless(data: bytes, longest: float) -> Iterator[np.ndarray]:
        try:
            while True:
                begun.set()
                yield np.zeros(RATE, np.float32)
                go_on.wait(10)
        finally:
            ended.set()

    monkeypatch.setattr(audio_memory, "read_parts", endless)
    memory = AudioMemory(1000 * SECOND)

    async def read() -> None:
        async with memory.reading(b"", 60.0):
            pass

    task = asyncio.create_task(read())
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert memory.held == 0
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
    assert memory.held == 0


def test_a_file_of_the_longest_kind_must_fit(tmp_path: Path) -> None:
    folder = tiny_moonshine(tmp_path)
    with pytest.raises(ConfigError, match="audio_memory"):
        AsrConfig(model=str(folder), max_audio=100.0, audio_memory=6 << 20)
    AsrConfig(model=str(folder), max_audio=90.0, audio_memory=6 << 20)


@pytest.mark.parametrize("length", [1, FRAME - 1, FRAME, 3 * FRAME + 7])
def test_levels_are_those_of_the_samples(length: int) -> None:
    sound = noise(1.0)[:length]
    padded = np.pad(sound.astype(np.float64), (0, -length % FRAME)).reshape(-1, FRAME)
    assert levels(sound) == pytest.approx(10 * np.log10((padded**2).mean(axis=1) + 1e-12))
