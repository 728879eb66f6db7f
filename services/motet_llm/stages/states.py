"""Define the states that pass between the stages of a model.

Shapes: R tokens whose states are sent, M states of a request, N tokens of a step, X width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(slots=True, frozen=True, eq=False)
class SentStates:
    """Hold states `[R, X]`, float32 on the CPU, of tokens from `start` on.

    positions: rotary positions int32 `[3, R]`; None if they are `start` and the next ones.
    """

    start: int
    states_RX: Tensor
    positions: np.ndarray | None = None


@dataclass(slots=True, frozen=True, eq=False)
class GivenStates:
    """Hold the states that are known when a request is added.

    states_MX: float32. replacing: so many tokens have theirs in place of an embedding. positions:
    rotary positions int32 `[3, n]` of the first tokens, behind which text goes on; None: those of
    text. ended: no more come.
    """

    states_MX: Tensor
    replacing: int
    positions: np.ndarray | None = None
    ended: bool = False


@dataclass(slots=True, frozen=True, eq=False)
class StepStates:
    """Hold the states `[N, X]` of a step's tokens.

    keeps_N: whose embeddings stay, and are added to. positions_3N: None: those of text.
    """

    states_NX: Tensor
    keeps_N: Tensor
    positions_3N: np.ndarray | None
