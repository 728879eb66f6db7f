"""Describe the norms of queries and keys that some models apply before rotary embedding.

Shapes: D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadNorm(NamedTuple):
    """Hold the parameters of `rms_norm` of queries and keys, each with weights `[D]` of its own."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float
    offset: float = 0.0
