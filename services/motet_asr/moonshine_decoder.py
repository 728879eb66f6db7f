"""Moonshine's decoder over slots: rotary positions, a gated feed-forward, and audio whose length varies by window.

B rows · T tokens · E model size · H heads · D head size · V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.moonshine.modeling_moonshine import apply_rotary_pos_emb

from .slots import Slots


class _Layer:
    """One decoder layer's weights, as this decoder uses them."""

    def __init__(self, layer: Any):
        own, cross = layer.self_attn, layer.encoder_attn
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm, layer.final_layernorm)
        self.qkv, self.qkv_bias = _joined_weights(own.q_proj, own.k_proj, own.v_proj)
        self.cross_kv, self.cross_kv_bias = _joined_weights(cross.k_proj, cross.v_proj)
        self.query, self.own_out, self.cross_out = cross.q_proj, own.o_proj, cross.o_proj
        self.mlp = layer.mlp
        self.scale: float = own.scaling


def _joined_weights(*linears: Any) -> tuple[Tensor, Tensor | None]:
    biases = [linear.bias for linear in linears]
    return torch.cat([linear.weight for linear in linears]), None if biases[0] is None else torch.cat(biases)


class MoonshineDecoder:
    """Takes a transformers `MoonshineForConditionalGeneration`; the same face as `WhisperDecoder`."""

    def __init__(self, model: Any):
        decoder = model.model.decoder
        self.num_heads: int = model.config.decoder_num_attention_heads
        self.head_size: int = decoder.layers[0].self_attn.head_dim
        self.length: int = model.config.max_position_embeddings
        self.dtype = decoder.embed_tokens.weight.dtype
        self._tokens, self._rotary = decoder.embed_tokens.weight, decoder.rotary_emb
        self._head, self._norm = model.proj_out, decoder.norm
        self._layers = [_Layer(layer) for layer in decoder.layers]

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
        rows, length = slice(first, first + len(ids)), len(ids[0])
        x_BTE = F.embedding(torch.tensor(ids), self._tokens)
        turn = self._rotary(x_BTE, torch.arange(length)[None])
        frames, mask = slots.cross_mask(rows.start, rows.stop)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x_BTE, turn)
            slots.own[index, 0, rows, :, :length], slots.own[index, 1, rows, :, :length] = k, v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
            x_BTE = x_BTE + _out(layer.own_out, attended)
            x_BTE = self._rest(layer, x_BTE, slots.cross[index, :, rows, :, :frames], mask)
        for row in range(rows.start, rows.stop):
            slots.filled[row] = length
        return self._norm(x_BTE)

    def step(self, slots: Slots, ids: list[int], watch: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Read one token into every row: their states [B, E]. It has no alignment heads to watch."""
        rows, positions_B = torch.arange(len(ids)), torch.tensor(slots.filled)
        x_BTE = F.embedding(torch.tensor(ids), self._tokens)[:, None]
        turn = self._rotary(x_BTE, positions_B[:, None])
        length, own_mask = slots.own_mask()
        frames, mask = slots.cross_mask(0, len(ids))
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x_BTE, turn)
            keys, values = slots.own[index]
            keys[rows, :, positions_B], values[rows, :, positions_B] = k[:, :, 0], v[:, :, 0]
            keys, values = keys[: len(ids), :, :length], values[: len(ids), :, :length]
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=own_mask, scale=layer.scale)
            x_BTE = x_BTE + _out(layer.own_out, attended)
            x_BTE = self._rest(layer, x_BTE, slots.cross[index, :, : len(ids), :, :frames], mask)
        slots.filled = [filled + 1 for filled in slots.filled]
        return self._norm(x_BTE)[:, 0], None

    def logits(self, states: Tensor) -> Tensor:
        """States [..., E] to logits [..., V] in float32."""
        return self._head(states).float()

    def _qkv(self, layer: _Layer, x_BTE: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x_BTE.shape
        qkv = F.linear(layer.norms[0](x_BTE), layer.qkv, layer.qkv_bias)
        q, k, v = qkv.view(batch, length, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        return *apply_rotary_pos_emb(q, k, *turn), v

    def _rest(self, layer: _Layer, x_BTE: Tensor, cross: Tensor, mask: Tensor | None) -> Tensor:
        """Cross-attention and feed-forward of a layer."""
        batch, length, _ = x_BTE.shape
        query = layer.query(layer.norms[1](x_BTE)).view(batch, length, self.num_heads, self.head_size).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, cross[0], cross[1], attn_mask=mask, scale=layer.scale)
        x_BTE = x_BTE + _out(layer.cross_out, attended)
        return x_BTE + layer.mlp(layer.norms[2](x_BTE))


def _out(out: Any, heads_BHTD: Tensor) -> Tensor:
    return out(heads_BHTD.transpose(1, 2).flatten(2))
