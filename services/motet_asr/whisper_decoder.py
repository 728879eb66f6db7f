"""Whisper's decoder over slots: transformers' modules and weights, our caches.

B rows · T tokens · E model size · H heads · D head size · V vocabulary. Queries, keys and values come from one matrix,
the cross-attention's keys and values are computed once per window, and a step touches only rows that are running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.linear import Linear

from .slots import Slots

Matrix = Callable[[Tensor], Tensor]
Heads = Sequence[tuple[int, int]]  # (layer, head)


def matrix(weight: Tensor, bias: Tensor | None, form: str) -> Matrix:
    """`x · Wᵀ + b`: torch's own, or packed by `motet_kernels` in the format `form`."""
    return partial(F.linear, weight=weight, bias=bias) if form == "torch" else Linear.pack(weight, bias, form)


class _Layer:
    """One decoder layer's weights, as this decoder uses them."""

    def __init__(self, layer: Any, heads: list[int], form: str):
        own, cross = layer.self_attn, layer.encoder_attn
        scale = own.scaling
        self.norms: tuple[nn.Module, ...] = (
            layer.self_attn_layer_norm,
            layer.encoder_attn_layer_norm,
            layer.final_layer_norm,
        )
        no_bias = torch.zeros_like(own.v_proj.bias)
        qkv = torch.cat([own.q_proj.weight * scale, own.k_proj.weight, own.v_proj.weight])
        self.qkv = matrix(qkv, torch.cat([own.q_proj.bias * scale, no_bias, own.v_proj.bias]), form)
        self.own_out = matrix(own.out_proj.weight, own.out_proj.bias, form)
        self.query = matrix(cross.q_proj.weight * scale, cross.q_proj.bias * scale, form)
        self.cross_kv = torch.cat([cross.k_proj.weight, cross.v_proj.weight])
        self.cross_kv_bias = torch.cat([no_bias, cross.v_proj.bias])
        self.cross_out = matrix(cross.out_proj.weight, cross.out_proj.bias, form)
        self.up = matrix(layer.fc1.weight, layer.fc1.bias, form)
        self.down = matrix(layer.fc2.weight, layer.fc2.bias, form)
        self.activation = layer.activation_fn
        self.heads = heads  # whose attention tells where a word is


class WhisperDecoder:
    """Takes a transformers `WhisperForConditionalGeneration`. `alignment`: the heads that `watch` records.

    form: of the matrices that every step reads: one of `motet_kernels.linear`, or "torch" for torch's own product.
    """

    def __init__(self, model: Any, alignment: Heads = (), form: str = "torch"):
        decoder = model.model.decoder
        self.num_heads = model.config.decoder_attention_heads
        self.head_size = model.config.d_model // self.num_heads
        self.length: int = model.config.max_target_positions
        self.dtype = decoder.embed_tokens.weight.dtype
        self._tokens, self._positions = decoder.embed_tokens.weight, decoder.embed_positions.weight
        self._head, self._norm = matrix(model.proj_out.weight, None, form), decoder.layer_norm
        self._layers = [
            _Layer(layer, [head for where, head in alignment if where == index], form)
            for index, layer in enumerate(decoder.layers)
        ]

    def slots(self, max_rows: int) -> Slots:
        return Slots(len(self._layers), self.num_heads, self.head_size, self.length, max_rows, self.dtype)

    def load_cross(self, slots: Slots, row: int, encoded_SE: Tensor) -> None:
        """Compute the cross-attention's keys and values of one window into its row."""
        frames = encoded_SE.shape[0]
        for index, layer in enumerate(self._layers):
            both = F.linear(encoded_SE, layer.cross_kv, layer.cross_kv_bias)
            kv_2HSD = both.view(frames, 2, self.num_heads, self.head_size).permute(1, 2, 0, 3)
            slots.cross[index, :, row, :, :frames] = kv_2HSD

    def prefill(self, slots: Slots, first: int, ids: list[list[int]]) -> Tensor:
        """Read prompts of equal length into rows from `first` on, over whatever was there; their states [B, T, E]."""
        rows = slice(first, first + len(ids))
        length = len(ids[0])
        x_BTE = F.embedding(torch.tensor(ids), self._tokens) + self._positions[:length]
        frames, mask = slots.cross_mask(rows.start, rows.stop)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x_BTE)
            slots.own[index, 0, rows, :, :length], slots.own[index, 1, rows, :, :length] = k, v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1)
            x_BTE = x_BTE + self._joined(layer.own_out, attended)
            query = self._query(layer, x_BTE)
            x_BTE = self._rest(layer, x_BTE, query, slots.cross[index, :, rows, :, :frames], mask)
        for row in range(rows.start, rows.stop):
            slots.filled[row] = length
        return self._norm(x_BTE)

    def step(self, slots: Slots, ids: list[int], watch: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Read one token into every row: their states [B, E], and the alignment heads' attention of the rows `watch`.

        That attention is [rows watched, heads, S]; None if nothing is watched.
        """
        rows, positions_B = torch.arange(len(ids)), torch.tensor(slots.filled)
        x_BTE = (F.embedding(torch.tensor(ids), self._tokens) + self._positions[positions_B])[:, None]
        length, own_mask = slots.own_mask()
        frames, mask = slots.cross_mask(0, len(ids))
        seen: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x_BTE)
            keys, values = slots.own[index]
            keys[rows, :, positions_B], values[rows, :, positions_B] = k[:, :, 0], v[:, :, 0]
            keys, values = keys[: len(ids), :, :length], values[: len(ids), :, :length]
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=own_mask, scale=1)
            x_BTE = x_BTE + self._joined(layer.own_out, attended)
            query = self._query(layer, x_BTE)
            cross = slots.cross[index, :, : len(ids), :, :frames]
            if watch and layer.heads:
                seen.append(_weights(query, cross[0], layer.heads, watch))
            x_BTE = self._rest(layer, x_BTE, query, cross, mask)
        slots.filled = [length + 1 for length in slots.filled]
        return self._norm(x_BTE)[:, 0], torch.cat(seen, dim=1) if seen else None

    def logits(self, states: Tensor) -> Tensor:
        """States [..., E] to logits [..., V] in float32."""
        return self._head(states).float()

    def _qkv(self, layer: _Layer, x_BTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x_BTE.shape
        qkv = layer.qkv(layer.norms[0](x_BTE))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        return q, k, v

    def _query(self, layer: _Layer, x_BTE: Tensor) -> Tensor:
        batch, length, _ = x_BTE.shape
        query = layer.query(layer.norms[1](x_BTE))
        return query.view(batch, length, self.num_heads, self.head_size).transpose(1, 2)

    def _rest(self, layer: _Layer, x_BTE: Tensor, query: Tensor, cross: Tensor, mask: Tensor | None) -> Tensor:
        """Cross-attention and feed-forward of a layer."""
        attended = F.scaled_dot_product_attention(query, cross[0], cross[1], attn_mask=mask, scale=1)
        x_BTE = x_BTE + self._joined(layer.cross_out, attended)
        return x_BTE + layer.down(layer.activation(layer.up(layer.norms[2](x_BTE))))

    def _joined(self, out: Matrix, heads_BHTD: Tensor) -> Tensor:
        return out(heads_BHTD.transpose(1, 2).flatten(2))


def _weights(query_BHTD: Tensor, keys_BHSD: Tensor, heads: list[int], watch: list[int]) -> Tensor:
    """Attention of some heads in some rows to all frames: [rows, heads, S]."""
    query, keys = query_BHTD[watch][:, heads], keys_BHSD[watch][:, heads]
    return (query @ keys.transpose(2, 3)).softmax(dim=-1)[:, :, 0].float()
