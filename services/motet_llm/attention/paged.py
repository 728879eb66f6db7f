"""Compute paged attention behind transformers' `AttentionInterface`.

A step is packed: one row of N tokens, first the decode rows (one token each), then the prefill
chunks one after the other. The model code sees an ordinary batch of one; the `StepLayout`, passed
to the attention function as the keyword argument `layout`, says where its tokens belong.

Shapes: N packed tokens, B rows, H heads, K key/value heads, D head dimension, C latent dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from motet_kernels.attention.paged_attention import paged_attention as attend_pages
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.attention.rotary import PackedHeads
from motet_kernels.recurrent.packed_rows import PackedRows
from motet_llm.cache.kv_cache import CPU, KvCache, LayerShape
from motet_llm.cache.state_cache import StateCache, StateShape
from motet_llm.engine.step_memory import StepMemory
from motet_llm.models.recurrent import Recurrent
from motet_shared.errors import ConfigError

from .heavy_hitters import Watch
from .long_context import Attend, LongRows
from .options import AttentionOptions, Reach
from .picture_spans import PictureSpan, attend_spans

NAME = "motet_paged"


class Layout(Protocol):
    """Define the interface of the keyword argument `layout` that model code passes on."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        """Store keys and values `[1, K, N, D]`, attend with `query` `[1, H, N, D]`.

        Returns `[1, N, H, Dv]`.
        """

    def attend_heads(
        self, layer: int, heads: PackedHeads, scale: float, options: AttentionOptions
    ) -> Tensor:
        """Attend as `attend` does, with heads packed by one projection and not yet rotated."""

    def attend_latent(
        self, layer: int, query_NHC: Tensor, latent_NC: Tensor, value_dim: int, scale: float
    ) -> Tensor:
        """Store a latent per token, the key of all heads, then attend. Return `[N, H, value_dim]`.

        The first `value_dim` numbers of a latent are the value.
        """

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        """Return the states of a recurrent layer, zero where a sequence begins."""


class RotatesHeads:
    """Represent a layout without pages, which rotates heads before it attends to them."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        raise NotImplementedError

    def attend_heads(
        self, layer: int, heads: PackedHeads, scale: float, options: AttentionOptions
    ) -> Tensor:
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in heads.rotated())
        return self.attend(layer, query, key, value, scale, options)


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
    attention_chunk: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend for model code: `[1, H, N, D]` and `[1, K, N, D]` in, `[1, N, H, D]` out.

    Causal, grouped heads, window, chunks, logit soft-capping and attention sinks as in transformers' eager
    functions. Raises ConfigError for a mask and for attention that is not causal.
    """
    if layout is None or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} keeps its own masks or drops keyword arguments: not supported"
        )
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{type(module).__name__} looks at later tokens: not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(
        Reach(sliding_window, attention_chunk),
        softcap=softcap,
        sinks_H=s_aux,
        temperature=getattr(module, "temperature", None),  # `support` puts it there
    )
    return layout.attend(layer, query, key, value, scale, options), None


@dataclass(slots=True)
class GroupStep:
    """Hold the slots of this step's tokens in a group of layers, and the blocks the rows attend to.

    long: rows that attend to more than the pool holds; they are not in `batch`.
    """

    slots_N: Tensor
    batch: PagedBatch
    long: LongRows | None = None


@dataclass(slots=True)
class StepLayout:
    """Describe the rows of one step, for each group of layers and for recurrent states if any.

    memory: the fixed addresses of the groups, if the step can be replayed.
    watched: watches that record queries, each with its slice of the packed tokens.
    positions_N: the tokens' positions in their sequences; None: rotary positions have several axes.
    spans: pictures among the tokens, if their tokens see each other in both directions.
    """

    kv: KvCache
    groups: list[GroupStep]
    states: StateCache | None = None
    state_rows: PackedRows | None = None
    memory: StepMemory | None = None
    watched: list[tuple[Watch, slice]] = field(default_factory=list)
    positions_N: Tensor | None = None
    spans: list[PictureSpan] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        group = self.groups[self.kv.group_of[layer]]
        self.kv.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), group.slots_N)
        return self._attend_rotated(layer, query[0].transpose(0, 1), scale, options)

    def attend_heads(
        self, layer: int, heads: PackedHeads, scale: float, options: AttentionOptions
    ) -> Tensor:
        group = self.groups[self.kv.group_of[layer]]
        return self._attend_rotated(
            layer, self.kv.write_heads(layer, heads, group.slots_N), scale, options
        )

    def _attend_rotated(
        self, layer: int, query_NHD: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        if options.temperature is not None and self.positions_N is not None:
            query_NHD = options.temperature.scaled(query_NHD, self.positions_N)
        for watch, places in self.watched:
            watch.note(layer, query_NHD[places], scale, options)
        attend = partial(
            attend_pages,
            scale=scale,
            window=options.window,
            softcap=options.softcap,
            sinks_H=options.sinks_H,
        )
        out_NHV = self._attend(layer, query_NHD, attend)
        if self.spans:
            attend_spans(self.kv, layer, query_NHD, out_NHV, self.spans, scale, options)
        return out_NHV.unsqueeze(0)

    def _attend(self, layer: int, query_NHD: Tensor, attend: Attend) -> Tensor:
        group = self.groups[self.kv.group_of[layer]]
        if group.long is not None:
            return group.long.attend(self.kv, layer, query_NHD, group.batch, attend)
        return attend(query_NHD, *self.kv.layer(layer), group.batch)

    def attend_latent(
        self, layer: int, query_NHC: Tensor, latent_NC: Tensor, value_dim: int, scale: float
    ) -> Tensor:
        group = self.groups[self.kv.group_of[layer]]
        self.kv.write(layer, latent_NC.unsqueeze(1), None, group.slots_N)

        def attend(query_NHC: Tensor, keys: Tensor, _: Tensor, batch: PagedBatch) -> Tensor:
            return attend_pages(query_NHC, keys, keys[..., :value_dim], batch, scale=scale)

        return self._attend(layer, query_NHC, attend)

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        if self.states is None or self.state_rows is None:
            raise ConfigError(
                f"layer {layer} has a recurrent state that it did not have when the model was loaded"
            )
        return Recurrent(self.states.layer(layer), self.state_rows)


class ShapeProbe(RotatesHeads):
    """Record what each layer would keep, the shapes of the caches, and attend to nothing."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self.layers: dict[int, LayerShape] = {}
        self.states: dict[int, StateShape] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        self._note(layer, LayerShape(key.shape[1], key.shape[3], value.shape[3], *options.reach))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def attend_latent(
        self, layer: int, query_NHC: Tensor, latent_NC: Tensor, value_dim: int, scale: float
    ) -> Tensor:
        self._note(layer, LayerShape(1, latent_NC.shape[1], 0))
        return query_NHC.new_zeros(*query_NHC.shape[:2], value_dim)

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        if layer in self.states:
            raise ConfigError(f"layer {layer} has two recurrent states: not supported")
        self.states[layer] = StateShape(shapes, dtype)
        states = tuple(torch.zeros(1, *shape, dtype=dtype, device=self.device) for shape in shapes)
        return Recurrent(
            states, PackedRows(torch.zeros(1, dtype=torch.long, device=self.device), [0, 1])
        )

    def _note(self, layer: int, shape: LayerShape) -> None:
        if layer in self.layers:
            raise ConfigError(f"layer {layer} attends twice per token: not supported")
        self.layers[layer] = shape
