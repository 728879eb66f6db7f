"""Synthesize speech with espeak-ng as PCM, and make sounds without speech."""

from __future__ import annotations

import io
import wave
from functools import lru_cache

import numpy as np

from motet_media.audio import Resampler, pcm_bytes
from recipes.speech.espeak import Voice, speak


@lru_cache(64)
def say(text: str, rate: int = 24000, voice: Voice = Voice()) -> bytes:  # noqa: B008  # frozen
    """Return `text` as PCM without silence around it."""
    spoken = speak(text, voice)
    loud = np.flatnonzero(np.abs(spoken.samples) > 0.02)
    pcm = (spoken.samples[loud[0] : loud[-1] + 1] * 32767).astype("<i2").tobytes()
    resampler = Resampler(spoken.rate, rate)
    return resampler.feed(pcm) + resampler.flush()


def wav(pcm: bytes, rate: int = 24000) -> bytes:
    """Encode PCM as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, 0, "NONE", ""))
        out.writeframes(pcm)
    return file.getvalue()


def silence(ms: float, rate: int = 24000) -> bytes:
    return bytes(pcm_bytes(ms, rate))


def noise(ms: float, rate: int = 24000, level: float = 0.02, seed: int = 0) -> bytes:
    """Return white noise; `level` is its RMS, 1 is full scale."""
    samples = np.random.default_rng(seed).normal(0, level * 32768, pcm_bytes(ms, rate) // 2)
    return np.clip(samples, -32768, 32767).astype("<i2").tobytes()


def mixed(one: bytes, other: bytes) -> bytes:
    """Mix both, at the longer one's length."""
    length = max(len(one), len(other))
    parts = [
        np.frombuffer(pcm.ljust(length, b"\x00"), "<i2").astype(np.int32) for pcm in (one, other)
    ]
    return np.clip(parts[0] + parts[1], -32768, 32767).astype("<i2").tobytes()
