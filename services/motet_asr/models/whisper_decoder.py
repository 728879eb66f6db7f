"""Decode Whisper over slots: transformers' weights, Motet's caches and kernels.

N packed tokens · B rows · T tokens of each · E model size · H heads · D head size · V vocabulary.

Queries, keys and values come from one matrix, the keys and values of the cross-attention are
computed once per window, and a step touches running rows only. The attention kernel treats a row of
the slots as one block. Where all of it is native code for the CPU, a step is recorded once per
number of rows and then replayed: otherwise half of a small model's step is Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from motet_asr.engine.slots import Slots
from motet_kernels import gpu
from motet_kernels.attention.kv import store_kv
from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.gates import gelu
from motet_kernels.runtime.device import NARROW, upload_all
from motet_kernels.runtime.replay import Tape, can_replay
from motet_kernels.spans import upload

from .decoder import Decoder, Norm, cross_matrix, matrix, norm

Heads = Sequence[tuple[int, int]]  # (layer, head)
_ROUNDED = ("bfloat16", "int8")  # formats for which bfloat16 keys and values are precise enough


class _Layer:
    """Hold one decoder layer's weights in the layout that this decoder uses."""

    def __init__(self, layer: Any, heads: list[int], form: str, native: bool):
        self_attention, cross_attention = layer.self_attn, layer.encoder_attn
        scale = self_attention.scaling
        norms = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm
        self.norms: tuple[Norm, ...] = tuple(norm(module, native) for module in norms)
        no_bias = torch.zeros_like(self_attention.v_proj.bias)
        qkv = torch.cat(
            [
                self_attention.q_proj.weight * scale,
                self_attention.k_proj.weight,
                self_attention.v_proj.weight,
            ]
        )
        self.qkv = matrix(
            qkv,
            torch.cat([self_attention.q_proj.bias * scale, no_bias, self_attention.v_proj.bias]),
            form,
        )
        self.self_out = matrix(self_attention.out_proj.weight, self_attention.out_proj.bias, form)
        self.query = matrix(
            cross_attention.q_proj.weight * scale, cross_attention.q_proj.bias * scale, form
        )
        self.cross_out = matrix(
            cross_attention.out_proj.weight, cross_attention.out_proj.bias, form
        )
        self.up = matrix(layer.fc1.weight, layer.fc1.bias, form)
        self.down = matrix(layer.fc2.weight, layer.fc2.bias, form)
        self.activation = gelu if native else layer.activation_fn
        # Alignment heads: their attention shows when a word is spoken.
        self.heads = upload_all([np.array(heads)], qkv.device)[0] if heads else None


@dataclass(slots=True)
class _TokenSlots:
    """Locate a call's packed tokens in the slots, on `device`.

    Each row from `first` on gets `count` new tokens after its `before` earlier ones.
    """

    device: torch.device
    slots: Slots
    first: int
    before: list[int]
    count: int
    self_batch: PagedBatch = field(init=False)
    cross_batch: PagedBatch = field(init=False)
    slots_N: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = torch.arange(self.first, self.first + len(self.before), dtype=torch.int32)
        starts = torch.arange(0, len(rows) * self.count + 1, self.count, dtype=torch.int32)
        before_B = torch.tensor(self.before, dtype=torch.int32)
        frames = self.slots.frames[self.first : self.first + len(rows)]
        self.self_batch = PagedBatch(rows[:, None], starts, before_B + self.count)
        self.cross_batch = PagedBatch(
            rows[:, None], starts, torch.tensor(frames, dtype=torch.int32)
        )
        begin_B = rows.long() * self.slots.length + before_B
        self.slots_N = (begin_B[:, None] + torch.arange(self.count)).flatten()
        if self.device.type != "cpu":
            self.self_batch, self.cross_batch = (
                self.self_batch.to(self.device),
                self.cross_batch.to(self.device),
            )
            self.slots_N = upload(self.slots_N, self.device)


@dataclass(frozen=True, slots=True)
class _RecordedRows:
    """Hold the rows whose attention is recorded and their encoder frames, on the device.

    `longest` is the maximum of these frames.
    """

    rows_W: Tensor
    frames_W: Tensor
    longest: int

    @classmethod
    def of(cls, rows: list[int], slots: Slots, device: torch.device) -> _RecordedRows:
        frames = [slots.frames[row] for row in rows]
        rows_W, frames_W = upload_all([np.array(rows), np.array(frames)], device)
        return cls(rows_W, frames_W, max(frames))


class _RecordedStep:
    """Record a step for a number of rows and replay it.

    Inputs that differ from step to step are written into `x_BE` and `tokens`.
    """

    def __init__(self, decoder: WhisperDecoder, slots: Slots, x_BE: Tensor):
        self._x_BE, self._token_slots = (
            x_BE.clone(),
            _TokenSlots(x_BE.device, slots, 0, slots.filled, 1),
        )
        self._begin_B = torch.arange(len(x_BE)) * slots.length
        self._tape = Tape(lambda: decoder._forward(self._x_BE, self._token_slots)[0])
        self.states_BE = self._tape.result

    def replay(self, slots: Slots, x_BE: Tensor) -> Tensor:
        tokens, before_B = self._token_slots, torch.tensor(slots.filled)
        self._x_BE.copy_(x_BE)
        torch.add(self._begin_B, before_B, out=tokens.slots_N)
        tokens.self_batch.lengths_B.copy_(before_B + 1)
        tokens.cross_batch.lengths_B.copy_(torch.tensor(slots.frames))
        return self._tape.replay()


class WhisperDecoder(Decoder):
    """Decode with a transformers `WhisperForConditionalGeneration`.

    alignment: the heads whose attention is recorded.
    form: format of the matrices: one of `motet_kernels.linear.linear`, or "torch" for torch's
        product.
    """

    def __init__(self, model: Any, alignment: Heads = (), form: str = "torch"):
        decoder = model.model.decoder
        self.num_heads = model.config.decoder_attention_heads
        self.head_size = model.config.d_model // self.num_heads
        self.length: int = model.config.max_target_positions
        self.device, self.dtype = (
            decoder.embed_tokens.weight.device,
            decoder.embed_tokens.weight.dtype,
        )
        self.kv_dtype = (
            torch.bfloat16 if form in _ROUNDED and self.dtype not in NARROW else self.dtype
        )
        self._tokens, self._positions = decoder.embed_tokens.weight, decoder.embed_positions.weight
        on_gpu, is_gelu = gpu.is_gpu(self.device), model.config.activation_function == "gelu"
        native = form != "torch" and is_gelu and (on_gpu or self.dtype == torch.float32)
        self._records = native and can_replay() and not on_gpu
        self._head, self._norm = (
            matrix(model.proj_out.weight, None, form),
            norm(decoder.layer_norm, native),
        )
        self._cross_kv = cross_matrix(decoder.layers, form)
        self._layers = [
            _Layer(layer, [head for where, head in alignment if where == index], form, native)
            for index, layer in enumerate(decoder.layers)
        ]

    def _prefill(self, slots: Slots, first: int, ids_BT: Tensor) -> Tensor:
        rows, count = ids_BT.shape
        x_BTE = F.embedding(ids_BT, self._tokens) + self._positions[:count]
        states, _ = self._forward(
            x_BTE.flatten(0, 1), _TokenSlots(self.device, slots, first, [0] * rows, count)
        )
        return states.view(x_BTE.shape)

    def _step(
        self, slots: Slots, ids_B: Tensor, before_B: Tensor, record_rows: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        x_BE = F.embedding(ids_B, self._tokens) + self._positions[before_B]
        if self._records and not record_rows:
            return self._replay(slots, x_BE), None
        recorded_rows = _RecordedRows.of(record_rows, slots, self.device) if record_rows else None
        states, recorded = self._forward(
            x_BE, _TokenSlots(self.device, slots, 0, slots.filled, 1), recorded_rows
        )
        return states, torch.cat(recorded, dim=1) if recorded else None

    def _replay(self, slots: Slots, x_BE: Tensor) -> Tensor:
        rows = len(x_BE)
        if rows in slots.tapes:
            output: Tensor = slots.tapes[rows].replay(slots, x_BE)
            return output
        slots.tapes[rows] = step = _RecordedStep(self, slots, x_BE)
        return step.states_BE

    def _forward(
        self, x_NE: Tensor, tokens: _TokenSlots, recorded_rows: _RecordedRows | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Store the tokens' keys and values; return states [N, E] and recorded attention.

        The attention has one entry for each layer with alignment heads; none without
        `recorded_rows`.
        """
        recorded: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            query, key, value = (
                layer.qkv(layer.norms[0](x_NE)).unflatten(1, (3, self.num_heads, -1)).unbind(1)
            )
            keys, values = tokens.slots.self_kv[index]
            store_kv(key, value, keys, values, tokens.slots_N)
            x_NE = layer.self_out(
                paged_attention(query, keys, values, tokens.self_batch, scale=1.0).flatten(1), x_NE
            )
            query = layer.query(layer.norms[1](x_NE)).unflatten(1, (self.num_heads, -1))
            keys, values = tokens.slots.cross_kv[index]
            if recorded_rows is not None and layer.heads is not None:
                recorded.append(_attention_to_frames(query, keys, layer.heads, recorded_rows))
            attended = paged_attention(
                query, keys, values, tokens.cross_batch, scale=1.0, causal=False
            )
            x_NE = layer.cross_out(attended.flatten(1), x_NE)
            x_NE = layer.down(layer.activation(layer.up(layer.norms[2](x_NE))), x_NE)
        return self._norm(x_NE), recorded


def _attention_to_frames(
    query_BHD: Tensor, keys_BHSD: Tensor, heads_A: Tensor, recorded_rows: _RecordedRows
) -> Tensor:
    """Return the attention of heads `heads_A` in watched rows to all frames: [rows, heads, S]."""
    query = query_BHD[recorded_rows.rows_W][:, heads_A, None]
    keys = keys_BHSD[recorded_rows.rows_W][:, heads_A, : recorded_rows.longest]
    scores = (query @ keys.to(query.dtype).transpose(2, 3))[:, :, 0].float()
    is_padding = (
        torch.arange(scores.shape[2], device=scores.device) >= recorded_rows.frames_W[:, None]
    )
    return scores.masked_fill(is_padding[:, None], float("-inf")).softmax(dim=-1)
