"""Convert a model's samples to the wire format: speed, 16 bits, sample rate.

Each sentence has a shaper of its own and is independent of the others.
"""

from __future__ import annotations

import numpy as np

from motet_media.audio import SAMPLE_BYTES, Resampler

from .stretch import Samples, Stretch

WIRE_RATE = 24_000  # Hz of the PCM that leaves the service
_FADE = 0.003  # seconds at both ends of a sentence, so that sentences join in silence


class Shaper:
    """Convert float samples at `sample_rate` to PCM (mono, 16-bit little-endian, 24 kHz)."""

    def __init__(self, sample_rate: int, speed: float = 1.0):
        self._stretch = Stretch(speed, sample_rate) if speed != 1.0 else None
        self._resample = Resampler(sample_rate, WIRE_RATE) if sample_rate != WIRE_RATE else None
        self._fade = round(_FADE * sample_rate)
        self._held = np.zeros(
            0, np.float32
        )  # the last samples, which are faded out if no others follow
        self._begun = False
        self.samples = 0  # output samples so far

    def push(self, samples: Samples) -> bytes:
        """Return the PCM that is ready after these samples."""
        if self._stretch is not None:
            samples = self._stretch.push(samples)
        joined = np.concatenate([self._held, samples])
        cut = max(0, len(joined) - self._fade)
        self._held = joined[cut:]
        return self._pcm(joined[:cut])

    def finish(self) -> bytes:
        """Return the remaining PCM, faded out."""
        rest = self._stretch.finish() if self._stretch is not None else self._held[:0]
        joined = np.concatenate([self._held, rest])
        size = min(self._fade, len(joined))
        joined[len(joined) - size :] *= np.linspace(1, 0, size, dtype=np.float32)
        return self._pcm(joined, last=True)

    def _pcm(self, samples: Samples, last: bool = False) -> bytes:
        if not self._begun and len(samples):
            samples = samples.copy()
            size = min(self._fade, len(samples))
            samples[:size] *= np.linspace(0, 1, size, dtype=np.float32)
            self._begun = True
        data = np.clip(np.rint(samples * 32767), -32768, 32767).astype("<i2").tobytes()
        if self._resample is not None:
            data = self._resample.feed(data)
            if last:
                data += self._resample.flush()
        self.samples += len(data) // SAMPLE_BYTES
        return data
