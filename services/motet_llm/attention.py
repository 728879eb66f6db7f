"""Paged attention behind transformers' `AttentionInterface`.

A step is packed: one row of N tokens, first the decode rows (one token each), then the prefill chunks one after the
other. The model code sees an ordinary batch of one; where its tokens belong is said by the `StepLayout` that travels
to the attention function as the keyword argument `layout`.

Shapes: N packed tokens, B rows, Q queries per row, T keys per row, H heads, K key/value heads, G = H/K, D head
dimension, M blocks per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_shared.errors import ConfigError

from .kv_cache import KvCache, LayerShape

NAME = "motet_paged"


@dataclass(slots=True)
class Rows:
    """Sequences whose attention is computed together: packed tokens `start : start + B·Q`, Q of each sequence."""

    start: int
    num_queries: int
    tables_BM: Tensor
    positions_BQ: Tensor
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        return self.start + self.positions_BQ.numel()

    def mask_B1QT(self, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where a query sees a key, -inf elsewhere; the same for all layers with the same window.

        A window of w shows the token itself and the w - 1 before it, as in transformers' masks.
        """
        if window not in self._masks:
            distance = self.positions_BQ[:, None, :, None] - torch.arange(num_keys)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._masks[window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[window]


class Layout(Protocol):
    """What the attention function finds in its keyword argument `layout`."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor: ...


@dataclass(slots=True, frozen=True)
class AttentionOptions:
    """What a layer adds to plain causal attention. `window` counts the token itself; `sinks_H` are logits per head."""

    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that model code calls. In `[1, H, N, D]` and `[1, K, N, D]`, out `[1, N, H, D]`.

    Causal, grouped heads, window, logit soft-capping and attention sinks as in transformers' eager functions.
    """
    if layout is None or attention_mask is not None:
        raise ConfigError(f"{type(module).__name__} keeps its own masks or drops keyword arguments: not supported")
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} looks at later tokens: not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(window=sliding_window, softcap=softcap, sinks_H=s_aux)
    return layout.attend(layer, query, key, value, scale, options), None


@dataclass(slots=True)
class StepLayout:
    """Where the packed tokens of one step go (`slots_N`) and which sequences (`rows`) attend to which blocks."""

    kv: KvCache
    slots_N: Tensor
    rows: list[Rows]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        """Store this step's keys and values, then let every row attend to all of its own."""
        self.kv.write(layer, self.slots_N, key[0].transpose(0, 1), value[0].transpose(0, 1))
        query_NHD = query[0].transpose(0, 1)
        out_NHD = query.new_empty(*query_NHD.shape[:2], value.shape[-1])
        for rows in self.rows:
            key_BKTD, value_BKTD = self.kv.gather(layer, rows.tables_BM)
            query_BHQD = query_NHD[rows.start : rows.stop].unflatten(0, (-1, rows.num_queries)).transpose(1, 2)
            mask_B1QT = rows.mask_B1QT(key_BKTD.shape[2], options.window, query.dtype)
            attend = _attend_fused if options.softcap is None and options.sinks_H is None else _attend_plain
            out_BHQD = attend(query_BHQD, key_BKTD, value_BKTD, mask_B1QT, scale, options)
            out_NHD[rows.start : rows.stop] = out_BHQD.transpose(1, 2).flatten(0, 1)
        return out_NHD.unsqueeze(0)


class ShapeProbe:
    """A layout that attends to nothing and notes what each layer would keep: the shapes of the cache."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        if layer in self.layers:
            raise ConfigError(f"layer {layer} attends twice per token: not supported")
        self.layers[layer] = LayerShape(heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _attend_fused(
    query_BHQD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    mask_B1QT: Tensor,
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """torch's kernel. While decoding, the heads of a group are the queries of one row: each key is read once."""
    if query_BHQD.shape[2] > 1:
        return F.scaled_dot_product_attention(
            query_BHQD, key_BKTD, value_BKTD, attn_mask=mask_B1QT, scale=scale, enable_gqa=True
        )
    query_BKGD = query_BHQD.reshape(len(query_BHQD), key_BKTD.shape[1], -1, query_BHQD.shape[-1])
    out_BKGD = F.scaled_dot_product_attention(query_BKGD, key_BKTD, value_BKTD, attn_mask=mask_B1QT, scale=scale)
    return out_BKGD.reshape(*query_BHQD.shape[:3], -1)


def _attend_plain(
    query_BHQD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    mask_B1QT: Tensor,
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """Matrix product and softmax, for what torch's kernel lacks: soft-capped logits, and sinks.

    A sink is one more logit per head that takes its share of the softmax and gives no value.
    """
    batch, heads, queries, _ = query_BHQD.shape
    query_BKGQD = query_BHQD.unflatten(1, (key_BKTD.shape[1], -1))
    scores = (query_BKGQD @ key_BKTD.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores + mask_B1QT
    if options.sinks_H is not None:
        sinks = options.sinks_H.to(scores.dtype).view(1, -1, 1, 1).expand(batch, -1, queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value_BKTD.dtype)[..., : key_BKTD.shape[2]]
    out = weights.unflatten(1, (key_BKTD.shape[1], -1)) @ value_BKTD.unsqueeze(2)
    return out.reshape(batch, heads, queries, -1)
