"""Draw noise that depends on (seed, sentence, frame) alone.

A sentence that is resumed on another instance thus draws the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1


def hash_numbers(*parts: int) -> int:
    """Hash numbers to 64 bits (SplitMix64's finalizer, Steele, Lea, Flood 2014)."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK_64) + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


@dataclass(frozen=True, slots=True)
class Noise:
    """Draw the noise of one frame of one sentence."""

    seed: int
    sentence: int
    frame: int

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(hash_numbers(self.seed, self.sentence, self.frame))

    def normal(self, *shape: int) -> Tensor:
        """Return standard normal noise, float32."""
        return torch.randn(shape, generator=self._generator())

    def uniform(self, *shape: int) -> Tensor:
        """Return uniform noise in [0, 1), float32."""
        return torch.rand(shape, generator=self._generator())

    def gumbel(self, *shape: int) -> Tensor:
        """Return standard Gumbel noise, float32.

        `argmax(logits + noise)` is then a sample of `softmax(logits)`.
        """
        uniform = self.uniform(*shape).clamp_(2.0**-24, 1 - 2.0**-24)
        return -(-uniform.log()).log()
