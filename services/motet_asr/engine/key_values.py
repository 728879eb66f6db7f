"""Hold the keys and values of one sequence each, and attend to them behind transformers' `AttentionInterface`.

A step computes the new positions of many sequences as one batch; only attention is computed
sequence by sequence, with the keys and values of each as they are: without padding, and without
copying those of a live stream that waits for audio.

B sequences · H heads · K heads of keys · T new positions · L positions so far · D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

NAME = "motet_sequences"
_FIRST = 64  # positions of a new buffer


class _Layer:
    """Hold one layer's keys and values in a buffer that doubles, or whose old ones leave it."""

    def __init__(self, window: int | None):
        self._window = window
        self._end = 0
        self._keys: Tensor | None = None  # [K, capacity, D]
        self._values: Tensor | None = None

    def append(self, keys_KTD: Tensor, values_KTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions; return [K, L, D] of all that the last one and those before may read."""
        count = keys_KTD.shape[1]
        keys, values = self._with_room(keys_KTD, count)
        end = self._end + count
        keys[:, self._end : end], values[:, self._end : end] = keys_KTD, values_KTD
        self._end = end
        begin = 0 if self._window is None else max(0, end - (self._window + count - 1))
        return keys[:, begin:end], values[:, begin:end]

    def _with_room(self, like_KTD: Tensor, count: int) -> tuple[Tensor, Tensor]:
        keys, values = self._keys, self._values
        if keys is not None and values is not None and self._end + count <= keys.shape[1]:
            return keys, values
        kept = self._end if self._window is None else min(self._end, self._window - 1)
        heads, _, size = like_KTD.shape
        buffers = []
        for old in (keys, values):
            new = like_KTD.new_empty(heads, max(2 * (kept + count), _FIRST), size)
            if old is not None:
                new[:, :kept] = old[:, self._end - kept : self._end]
            buffers.append(new)
        self._end = kept
        self._keys, self._values = buffers
        return buffers[0], buffers[1]

    @property
    def nbytes(self) -> int:
        return 0 if self._keys is None or self._values is None else 2 * self._keys.nbytes


class KeyValues:
    """Hold the keys and values of one sequence, those within a sliding window if there is one.

    window: positions that the last one attends to, itself included; None: all.
    length: positions so far, those that were forgotten included.
    """

    def __init__(self, layers: int, window: int | None = None):
        self.window = window
        self.length = 0
        self.layers = [_Layer(window) for _ in range(layers)]

    def attend(
        self, layer: int, query_HTD: Tensor, keys_KTD: Tensor, values_KTD: Tensor, scale: float
    ) -> Tensor:
        """Store new positions of a layer; return what they attend to, [H, T, D]."""
        keys, values = self.layers[layer].append(keys_KTD, values_KTD)
        attended = F.scaled_dot_product_attention(
            query_HTD[None],
            keys[None],
            values[None],
            attn_mask=self._mask(query_HTD.shape[1], keys.shape[1], query_HTD.device),
            scale=scale,
            enable_gqa=query_HTD.shape[0] != keys.shape[0],
        )
        return attended[0]

    def _mask(self, count: int, total: int, device: torch.device) -> Tensor | None:
        """Return [T, L], True where a new position may attend; None if it may everywhere."""
        if count == 1:
            return None
        distance = (
            torch.arange(total - count, total, device=device)[:, None]
            - torch.arange(total, device=device)[None]
        )
        allowed = distance >= 0
        return allowed if self.window is None else allowed & (distance < self.window)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held."""
        return sum(layer.nbytes for layer in self.layers)


def attend(
    module: Any,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sequences: Sequence[KeyValues],
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention layers call it; returns [B, T, H, D].

    sequences: of the batch, which the caller passes to the model's forward.
    """
    attended = [
        sequence.attend(module.layer_idx, query, keys, values, scaling)
        for sequence, query, keys, values in zip(
            sequences, query_BHTD, key_BKTD, value_BKTD, strict=True
        )
    ]
    return torch.stack(attended).transpose(1, 2), None


def use_sequences(config: Any) -> None:
    """Have the attention layers of a config of transformers call `attend`."""
    AttentionInterface.register(NAME, attend)
    config._attn_implementation_internal = NAME
