"""Provide what all encoder-decoder families share in their decoders over slots.

B rows · T tokens · S encoder frames · E model size · H heads · D head size · V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_asr.engine.slots import Slots
from motet_kernels.linear.pack import pack_linear
from motet_kernels.norm import layer_norm
from motet_kernels.runtime.device import upload_all

Matrix = Callable[..., Tensor]
Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Plain:
    """Multiply with torch, behind the interface of `motet_kernels.linear.linear.Linear`."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else out + residual


def matrix(weight: Tensor, bias: Tensor | None, form: str = "torch") -> Matrix:
    """Return `x · Wᵀ + b (+ residual)`: torch's own, or packed by `motet_kernels` as `form`."""
    return _Plain(weight, bias) if form == "torch" else pack_linear(weight, bias, form)


def norm(module: nn.LayerNorm, native: bool) -> Norm:
    """Return a layer norm: torch's own, or that of `motet_kernels`."""
    if not native:
        return module
    weight, bias = module.weight.detach().float(), module.bias.detach().float()
    return partial(layer_norm, weight_C=weight, bias_C=bias, eps=module.eps)


def cross_matrix(layers: Sequence[Any], form: str = "torch") -> Matrix:
    """Return one matrix for the cross-attention's keys and values of all layers."""
    parts = [
        part for layer in layers for part in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)
    ]
    biases = [
        part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias
        for part in parts
    ]
    biased = any(part.bias is not None for part in parts)
    return matrix(
        torch.cat([part.weight for part in parts]), torch.cat(biases) if biased else None, form
    )


class Decoder(ABC):
    """Decode tokens over slots; a family sets the attributes below and implements its layers.

    length: most tokens of a row.
    device: where it computes.
    dtype: of the encoder's states.
    kv_dtype: of the slots.
    """

    num_heads: int
    head_size: int
    length: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    _layers: Sequence[Any]
    _cross_kv: Matrix
    _head: Matrix

    def slots(self, max_rows: int) -> Slots:
        """Return empty slots of this decoder's shape for up to `max_rows` windows."""
        shape = (len(self._layers), self.num_heads, self.head_size)
        return Slots(*shape, self.length, max_rows, self.kv_dtype, self.device)

    def load_cross(self, slots: Slots, row: int, encoded_SE: Tensor) -> None:
        """Compute the cross-attention's keys and values of one window into its row."""
        kv = self._cross_kv(encoded_SE).view(len(encoded_SE), -1, 2, self.num_heads, self.head_size)
        slots.cross_kv[:, :, row, :, : len(encoded_SE)] = kv.permute(1, 2, 3, 0, 4)

    def prefill(self, slots: Slots, first: int, ids: list[list[int]]) -> Tensor:
        """Prefill prompts of equal length into rows from `first` on; return states [B, T, E].

        Previous contents of the rows are overwritten.
        """
        count = len(ids[0])
        (ids_BT,) = upload_all([np.array(ids)], self.device)
        states = self._prefill(slots, first, ids_BT)
        slots.filled[first : first + len(ids)] = [count] * len(ids)
        return states

    def step(
        self, slots: Slots, ids: list[int], record_rows: list[int] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Decode one token per row; return states [B, E] and the attention of `record_rows`.

        That attention is of the alignment heads, [rows, heads, S], zero after a row's last frame;
        None if no rows are given or the model has no such heads. The next step may overwrite the
        states.
        """
        ids_B, before_B = upload_all([np.array(ids), np.array(slots.filled)], self.device)
        states, attention = self._step(slots, ids_B, before_B, record_rows or [])
        slots.filled = [filled + 1 for filled in slots.filled]
        return states, attention

    def logits(self, states: Tensor) -> Tensor:
        """Map states [..., E] to logits [..., V] in float32."""
        return self._head(states).float()

    @abstractmethod
    def _prefill(self, slots: Slots, first: int, ids_BT: Tensor) -> Tensor: ...

    @abstractmethod
    def _step(
        self, slots: Slots, ids_B: Tensor, before_B: Tensor, record_rows: list[int]
    ) -> tuple[Tensor, Tensor | None]: ...
