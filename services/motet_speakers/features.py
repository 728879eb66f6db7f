"""Compute the encoder's input: log power in 48 mel bands, 100 frames per second."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

RATE = 16_000
HOP, WINDOW, SPECTRUM = 160, 400, 512  # samples
BANDS = 48
SHORTEST = 0.4  # seconds: shorter audio is repeated up to this length
_LOWEST, _HIGHEST = 60.0, 7600.0  # Hz
_RANGE = 1e-6  # relative to the loudest band: lower power is clamped
_SCALE = 3.0  # brings the features to about unit variance

Floats = NDArray[np.float32]


def mel(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert Hz to mel."""
    return 2595 * np.log10(1 + hertz / 700)


def _filters() -> Floats:
    """Return (SPECTRUM // 2 + 1, BANDS): triangles that overlap by half, evenly spaced in mel."""
    lowest, highest = mel(np.array([_LOWEST, _HIGHEST])).tolist()
    edges = np.linspace(lowest, highest, BANDS + 2)
    bins = mel(np.linspace(0, RATE / 2, SPECTRUM // 2 + 1))[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    value: Floats = np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
    return value


_FILTERS = _filters()
_HANN = np.hanning(WINDOW).astype(np.float32)


def features(samples: Floats) -> Floats:
    """Return (frames, BANDS) of mono audio at 16 kHz, one frame per HOP samples.

    The result does not depend on the level. Audio shorter than SHORTEST is repeated; at least one
    sample is needed.
    """
    shortest = int(SHORTEST * RATE)
    whole = samples if len(samples) >= shortest else np.resize(samples, shortest)
    frames = sliding_window_view(whole, WINDOW)[::HOP] * _HANN
    spectrum = np.fft.rfft(frames, SPECTRUM).astype(np.complex64)
    power = (spectrum.real**2 + spectrum.imag**2) @ _FILTERS
    level = np.log(np.maximum(power, power.max() * _RANGE + 1e-12))
    value: Floats = ((level - level.mean()) / _SCALE).astype(np.float32)
    return value
