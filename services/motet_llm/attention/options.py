"""Describe what a layer adds to plain causal attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, frozen=True)
class AttentionOptions:
    """Options of one layer.

    window: tokens that a token sees, itself included; None: all.
    softcap: limit of soft-capped scores; None: no limit.
    sinks_H: one logit per head.
    """

    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
