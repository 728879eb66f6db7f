"""Describe a sampling step: parameters of a row, edits of logits, and log-probabilities.

Shapes: E edits, L rows whose log-probabilities are requested, N alternatives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

GREEDY_BELOW = 1e-5  # smaller temperatures count as 0: they would overflow float32


class Choice(NamedTuple):
    """Hold the sampling parameters of a row.

    temperature: 0 takes the most likely token, whatever the other parameters are.
    top_k: 0 disables it.
    top_p, min_p: shares; 1 and 0 disable them.
    seed, position: of the noise; nothing else determines the draw.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    @property
    def draws(self) -> bool:
        """Return True if the token is drawn, False if the most likely one is taken."""
        return self.temperature >= GREEDY_BELOW

    @property
    def filters(self) -> bool:
        """Return True if the token is drawn after a filter: top-k, top-p or min-p."""
        return self.draws and bool(self.top_k or self.top_p < 1 or self.min_p)


class Edits(NamedTuple):
    """Hold changes of single logits, each an array `[E]` of the host; no pair (row, token) twice.

    rows, tokens: int32.
    bias, factor, penalty: float32. A logit is increased by `bias` (logit_bias), then divided by
        `factor` (multiplied where it is negative: repetition_penalty), then decreased by `penalty`
        (presence and frequency penalties).
    """

    rows: np.ndarray
    tokens: np.ndarray
    bias: np.ndarray
    factor: np.ndarray
    penalty: np.ndarray


class Logprobs(NamedTuple):
    """Hold log-probabilities of chosen tokens, and of the N most likely of each row, best first."""

    chosen_L: Tensor
    values_LN: Tensor
    ids_LN: Tensor
