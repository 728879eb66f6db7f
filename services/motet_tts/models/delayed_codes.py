"""Keep track of codes that are delayed against each other: code k of a frame comes d[k] steps later.

A step of such a model draws one code of each codebook, of different frames. The first codes of a
codebook are given: a code that means the beginning, or those of a recording whose voice is
continued. Source of the pattern: MusicGen (Copet et al. 2023), section 2.

Shapes: K codebooks, T steps, N frames.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class DelayedCodes:
    """Follow the steps of one sentence: what is given in them, and which frame they complete.

    prefix: codes `[N, K]` before those that are drawn.
    """

    def __init__(self, delays: list[int], begin: int, prefix: Tensor):
        self._delays, self._unheard = delays, max(delays) + len(prefix)
        self._given_TK = _delayed(prefix, delays, begin)
        self._steps: deque[Tensor] = deque(maxlen=max(delays) + 1)
        self.step = 0  # steps so far
        self.fed_NK = self._given_TK[: len(prefix)]  # the steps in which nothing is drawn
        for codes_K in self.fed_NK:
            self.push(codes_K)

    def complete(self, drawn_K: Tensor) -> Tensor:
        """Return the codes of a step with those that are given in place of what was drawn."""
        if self.step >= len(self._given_TK):
            return drawn_K
        given_K = self._given_TK[self.step].to(drawn_K.device)
        return torch.where(given_K < 0, drawn_K, given_K)

    def push(self, codes_K: Tensor) -> Tensor | None:
        """Add a step; return the drawn frame `[K]` that it completes, None before there is one."""
        self._steps.append(codes_K)
        self.step += 1
        if self.step <= self._unheard:
            return None
        return torch.stack([self._steps[delay][k] for k, delay in enumerate(self._delays)])


def _delayed(prefix_NK: Tensor, delays: list[int], begin: int) -> Tensor:
    """Return the codes given in the first steps, `[T, K]`: `begin` before the prefix, -1 after it."""
    steps = len(prefix_NK) + max(delays)
    given_TK = torch.full((steps, len(delays)), -1)
    for k, delay in enumerate(delays):
        given_TK[:delay, k] = begin
        given_TK[delay : delay + len(prefix_NK), k] = prefix_NK[:, k]
    return given_TK
