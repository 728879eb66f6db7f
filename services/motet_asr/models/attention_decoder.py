"""Decode over slots with pre-norm transformer decoders: Moonshine's, and that of Canary and Cohere.

They differ in their positions and in what is done to the encoder's states.

B rows · T tokens · E model size · H heads · D head size · V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.moonshine.modeling_moonshine import apply_rotary_pos_emb

from motet_asr.engine.slots import Slots
from motet_shared.errors import ConfigError

from .decoder import Decoder, cross_matrix, matrix


class _Layer:
    """Hold one decoder layer's weights in the layout that this decoder uses."""

    def __init__(self, layer: Any):
        self_attention, cross_attention = layer.self_attn, layer.encoder_attn
        self.norms = (layer.input_layernorm, layer.post_attention_layernorm, layer.final_layernorm)
        biases = [
            part.bias
            for part in (self_attention.q_proj, self_attention.k_proj, self_attention.v_proj)
        ]
        weight = torch.cat(
            [
                self_attention.q_proj.weight,
                self_attention.k_proj.weight,
                self_attention.v_proj.weight,
            ]
        )
        self.qkv = matrix(weight, None if biases[0] is None else torch.cat(biases))
        self.query, self.self_out, self.cross_out = (
            cross_attention.q_proj,
            self_attention.o_proj,
            cross_attention.o_proj,
        )
        self.mlp = layer.mlp
        self.scale: float = self_attention.scaling


class AttentionDecoder(Decoder):
    """Decode with the decoder of a transformers model; it has no alignment heads.

    Raises ConfigError if heads share keys and values.
    """

    def __init__(self, model: Any):
        decoder = model.model.decoder
        attention = decoder.layers[0].self_attn
        self.head_size: int = attention.head_dim
        self.num_heads: int = attention.q_proj.out_features // attention.head_dim
        self.length: int = decoder.config.max_position_embeddings
        self.device = decoder.embed_tokens.weight.device
        self.dtype = self.kv_dtype = decoder.embed_tokens.weight.dtype
        self._decoder = decoder
        self._head, self._norm = model.proj_out, decoder.norm
        if attention.k_proj.out_features != attention.q_proj.out_features:
            raise ConfigError(
                f"num_key_value_heads: {attention.k_proj.out_features // self.head_size} for "
                f"{self.num_heads} heads; give a checkpoint with as many"
            )
        self._cross_kv = cross_matrix(decoder.layers)
        self._layers = [_Layer(layer) for layer in decoder.layers]

    def _embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        """Return the states [B, T, E] of tokens before the first layer."""
        return F.embedding(ids_BT, self._decoder.embed_tokens.weight)

    def _rotary(self, x_BTE: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rotary embeddings of the positions; None without any."""
        return None

    def _prefill(self, slots: Slots, first: int, ids_BT: Tensor) -> Tensor:
        rows, count = ids_BT.shape
        positions_BT = torch.arange(count, device=self.device).expand(rows, count)
        return self._forward(slots, slice(first, first + rows), ids_BT, positions_BT, count, None)

    def _step(
        self, slots: Slots, ids_B: Tensor, before_B: Tensor, record_rows: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        length, mask = slots.self_mask()
        states_BTE = self._forward(
            slots, slice(0, len(ids_B)), ids_B[:, None], before_B[:, None], length, mask
        )
        return states_BTE[:, 0], None

    def _forward(
        self,
        slots: Slots,
        rows: slice,
        ids_BT: Tensor,
        positions_BT: Tensor,
        length: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Store keys and values of the tokens and return their states [B, T, E].

        Each token attends to those up to itself in its row.

        length: tokens of the longest row afterwards.
        mask: which of them each row may attend to, if rows differ.
        """
        x_BTE = self._embed(ids_BT, positions_BT)
        rotary = self._rotary(x_BTE, positions_BT)
        cache_index = (
            torch.arange(rows.start, rows.stop, device=self.device)[:, None],
            slice(None),
            positions_BT,
        )
        causal = ids_BT.shape[1] > 1
        frames, cross_mask = slots.cross_mask(rows.start, rows.stop)
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x_BTE, rotary)
            keys, values = slots.self_kv[index]
            keys[cache_index], values[cache_index] = k.transpose(1, 2), v.transpose(1, 2)
            keys, values = keys[rows, :, :length], values[rows, :, :length]
            attended = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=mask, is_causal=causal, scale=layer.scale
            )
            x_BTE = x_BTE + _out(layer.self_out, attended)
            x_BTE = self._finish_layer(
                layer, x_BTE, slots.cross_kv[index, :, rows, :, :frames], cross_mask
            )
        states_BTE: Tensor = self._norm(x_BTE)
        return states_BTE

    def _qkv(
        self, layer: _Layer, x_BTE: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x_BTE.shape
        qkv = layer.qkv(layer.norms[0](x_BTE))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, self.head_size).permute(2, 0, 3, 1, 4)
        return (q, k, v) if rotary is None else (*apply_rotary_pos_emb(q, k, *rotary), v)

    def _finish_layer(
        self, layer: _Layer, x_BTE: Tensor, cross: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Apply cross-attention and feed-forward of a layer."""
        batch, length, _ = x_BTE.shape
        query = (
            layer.query(layer.norms[1](x_BTE))
            .view(batch, length, self.num_heads, self.head_size)
            .transpose(1, 2)
        )
        attended = F.scaled_dot_product_attention(
            query, cross[0], cross[1], attn_mask=mask, scale=layer.scale
        )
        x_BTE = x_BTE + _out(layer.cross_out, attended)
        output: Tensor = x_BTE + layer.mlp(layer.norms[2](x_BTE))
        return output


def _out(out: Any, heads_BHTD: Tensor) -> Tensor:
    output: Tensor = out(heads_BHTD.transpose(1, 2).flatten(2))
    return output


class MoonshineDecoder(AttentionDecoder):
    """Decode Moonshine: rotary positions."""

    def _rotary(self, x_BTE: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        rotary: tuple[Tensor, Tensor] = self._decoder.rotary_emb(x_BTE, positions_BT)
        return rotary


class StreamingMoonshineDecoder(MoonshineDecoder):
    """Decode Moonshine streaming: the encoder has no positions, they are added here."""

    def load_cross(self, slots: Slots, row: int, encoded_SE: Tensor) -> None:
        positions_SE = self._decoder.pos_emb.weight[: len(encoded_SE)]
        super().load_cross(slots, row, self._decoder.proj(encoded_SE + positions_SE))


class CanaryDecoder(AttentionDecoder):
    """Decode Canary and Cohere's transcriber: positions are added to tokens, and both normalized."""

    def _embed(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        tokens_BTE = super()._embed(ids_BT, positions_BT)
        positions_BTE = self._decoder.pos_emb(positions_BT).to(tokens_BTE.dtype)
        embedded: Tensor = self._decoder.embedding_layernorm(tokens_BTE + positions_BTE)
        return embedded

    def load_cross(self, slots: Slots, row: int, encoded_SE: Tensor) -> None:
        project = getattr(self._decoder, "proj", None)
        super().load_cross(slots, row, encoded_SE if project is None else project(encoded_SE))
