"""Change the speed of speech at the same pitch, as a stream; chunk borders do not matter.

Implements WSOLA (Verhelst, Roelands: An overlap-add technique based on waveform similarity, ICASSP
1993): pieces of the input are overlapped at another distance, each taken where it best continues
the previous one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_WINDOW = 0.03  # seconds: a few periods of the lowest voice
_SEARCH = 0.01  # seconds around the nominal position
_NOTHING: Samples = np.zeros(0, np.float32)


class Stretch:
    """Stretch a stream of samples; `speed` 2 is twice as fast.

    `push` returns what is ready, `finish` the rest; together `round(len / speed)` samples.
    """

    def __init__(self, speed: float, sample_rate: int):
        self._speed = speed
        self._hop = int(_WINDOW * sample_rate / 2)
        self._search = int(_SEARCH * sample_rate)
        ramp = np.sin(np.arange(self._hop) * (np.pi / 2 / self._hop)) ** 2
        self._rise = ramp.astype(np.float32)
        self._fall = (1 - self._rise).astype(np.float32)
        self._input = _NOTHING
        self._dropped = 0  # input samples that were discarded
        self._received = 0  # of the whole input
        self._given = 0
        self._frame = 0
        self._last = 0  # where the last frame was taken
        self._tail = _NOTHING  # the second half of the last frame

    def push(self, samples: Samples) -> Samples:
        """Return the output that is ready after these samples."""
        self._received += len(samples)
        self._input = np.concatenate([self._input, samples])
        return self._frames(self._received)

    def finish(self) -> Samples:
        """Return the remaining output; the instance is then used up."""
        due = round(self._received / self._speed) - self._given
        silence = np.zeros(
            4 * self._hop + 2 * self._search + int(2 * self._hop * self._speed), np.float32
        )
        self._input = np.concatenate([self._input, silence])
        rest = np.concatenate([self._frames(self._received + len(silence)), self._tail])
        return np.concatenate([rest, np.zeros(max(0, due - len(rest)), np.float32)])[: max(0, due)]

    def _frames(self, end: int) -> Samples:
        """Return the output of all frames whose search region is within the input up to `end`."""
        chunks = []
        while (
            target := round(self._frame * self._hop * self._speed)
        ) + self._search + 2 * self._hop <= end and (self._last + 3 * self._hop <= end):
            chunks.append(self._half_frame(target))
        output = np.concatenate(chunks) if chunks else _NOTHING
        self._given += len(output)
        self._discard(target)
        return output

    def _half_frame(self, target: int) -> Samples:
        """Return the half frame of output that a new frame completes."""
        at = target if self._frame == 0 else self._best(target)
        piece = self._slice(at, at + 2 * self._hop)
        head, tail = piece[: self._hop], piece[self._hop :] * self._fall
        output = head if self._frame == 0 else self._tail + head * self._rise
        self._tail, self._last = tail, at
        self._frame += 1
        return output

    def _best(self, target: int) -> int:
        """Return the position near `target` that best matches what followed the last frame."""
        continuation = self._slice(self._last + self._hop, self._last + 3 * self._hop)
        low = max(0, target - self._search)
        region = self._slice(low, target + self._search + 2 * self._hop)
        match = np.correlate(region, continuation, "valid")
        energy = np.concatenate([[0.0], np.cumsum(region.astype(np.float64) ** 2)])
        norm = np.sqrt(np.maximum(energy[len(continuation) :] - energy[: -len(continuation)], 1e-9))
        return low + int(np.argmax(match / norm))

    def _slice(self, begin: int, end: int) -> Samples:
        return self._input[begin - self._dropped : end - self._dropped]

    def _discard(self, target: int) -> None:
        keep = max(self._dropped, min(self._last + self._hop, target - self._search))
        self._input = self._input[keep - self._dropped :]
        self._dropped = keep
