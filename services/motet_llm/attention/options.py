"""Describe what a layer adds to plain causal attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Reach(NamedTuple):
    """Describe which tokens up to itself a token attends to; both None: all.

    window: so many, itself included. chunk: those of its own chunk of that length.
    """

    window: int | None = None
    chunk: int | None = None


ALL = Reach()


class Temperature(NamedTuple):
    """Scale queries by position, after Llama 4: 1 + attn_scale · log(1 + floor((p + 1) / floor_scale)).

    (Nakanishi 2025, "Scalable-Softmax Is Superior for Attention".)
    """

    floor_scale: float
    attn_scale: float

    def scaled(self, query_NHD: Tensor, positions_N: Tensor) -> Tensor:
        """Return queries times the scales of their positions."""
        steps_N = torch.floor((positions_N.float() + 1.0) / self.floor_scale)
        scale_N = torch.log1p(steps_N) * self.attn_scale + 1.0
        return (query_NHD * scale_N[:, None, None]).to(query_NHD.dtype)


@dataclass(slots=True, frozen=True)
class AttentionOptions:
    """Hold the options of one layer.

    reach: which tokens a token attends to.
    softcap: limit of soft-capped scores; None: no limit.
    sinks_H: one logit per head.
    temperature: scales of queries; None: 1.
    """

    reach: Reach = ALL
    softcap: float | None = None
    sinks_H: Tensor | None = None
    temperature: Temperature | None = None

    @property
    def window(self) -> int | None:
        """Return the window of `reach`."""
        return self.reach.window
