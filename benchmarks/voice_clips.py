"""The sounds that recognizers are timed on: noise that swells like syllables, different for each clip."""

from __future__ import annotations

import numpy as np

RATE = 16_000  # Hz

Sound = np.ndarray[tuple[int], np.dtype[np.float32]]


def clips(count: int, seconds: float) -> list[Sound]:
    """Always the same, float32 in -1 to 1."""
    return [_clip(seconds, seed) for seed in range(count)]


def _clip(seconds: float, seed: int) -> Sound:
    generator = np.random.default_rng(seed)
    samples = round(seconds * RATE)
    swell = np.abs(np.sin(np.arange(samples) * (3 + seed % 5) * np.pi / RATE))
    return (0.2 * generator.standard_normal(samples) * swell).astype(np.float32)
