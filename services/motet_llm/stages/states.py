"""Define the states that pass between the stages of a model.

Shapes: R tokens whose states are sent, M states of a request, N tokens of a step, W numbers of a
state, K further codes of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(slots=True, frozen=True, eq=False)
class SentStates:
    """Hold states `[R, W]`, float32 on the CPU, of tokens from `start` on.

    positions: rotary positions int32 `[3, R]`; None if they are `start` and the next ones.
    """

    start: int
    states_RW: Tensor
    positions: np.ndarray | None = None


@dataclass(slots=True, frozen=True, eq=False)
class GivenStates:
    """Hold the states that are known when a request is added.

    states_MW: float32. replacing: so many tokens have theirs in place of an embedding. positions:
    rotary positions int32 `[3, n]` of the first tokens, behind which text goes on; None: those of
    text. ended: no more come. codes: the further codes of the frames in the output so far, if a
    frame has several.
    """

    states_MW: Tensor
    replacing: int
    positions: np.ndarray | None = None
    ended: bool = False
    codes: Sequence[Sequence[int]] = ()


@dataclass(slots=True, frozen=True, eq=False)
class StepStates:
    """Hold the states `[N, W]` of a step's tokens.

    keeps_N: whose embeddings stay, and are added to. positions_3N: None: those of text. codes_NK:
    further codes of the frames that tokens stand for, `NO_CODE` for others; None: there are none.
    """

    states_NW: Tensor
    keeps_N: Tensor
    positions_3N: np.ndarray | None
    codes_NK: Tensor | None = None
