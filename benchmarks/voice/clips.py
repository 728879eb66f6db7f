"""Generate the clips on which recognizers are timed: noise that swells like syllables."""

from __future__ import annotations

import numpy as np

RATE = 16_000  # Hz

Sound = np.ndarray[tuple[int], np.dtype[np.float32]]


def clips(count: int, seconds: float) -> list[Sound]:
    """Return `count` different clips, always the same, float32 in -1 to 1."""
    return [_clip(seconds, seed) for seed in range(count)]


def _clip(seconds: float, seed: int) -> Sound:
    generator = np.random.default_rng(seed)
    samples = round(seconds * RATE)
    swell = np.abs(np.sin(np.arange(samples) * (3 + seed % 5) * np.pi / RATE))
    return (0.2 * generator.standard_normal(samples) * swell).astype(np.float32)
