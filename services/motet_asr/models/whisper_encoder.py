"""Encode Whisper's windows with packed weights and attention to all frames.

M mel bins · F feature frames of 10 ms · S encoder frames of 20 ms · N those of all windows · E
model size · H heads · D head size. On a CPU windows are encoded one by one: each has enough rows to
saturate the processor, and its states are bit-identical in any batch. On a GPU they are packed into
one row, so that a layer takes the same number of launches for any number of windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation

from motet_kernels import gpu
from motet_kernels.attention.full_attention import full_attention, packed_attention
from motet_kernels.gates import gelu
from motet_kernels.linear.activated_linear import activated_linear
from motet_kernels.linear.pack import pack_linear
from motet_kernels.runtime import native as native_kernels
from motet_kernels.runtime.device import dtype_name
from motet_kernels.spans import Spans

from .decoder import norm

_TAPS = 3  # frames per convolution kernel


class _Convolution:
    """Compute a convolution over three frames and its GELU as one matrix product."""

    def __init__(self, conv: nn.Conv1d, form: str):
        self._stride = int(conv.stride[0])
        self._width = conv.in_channels
        weight = conv.weight.permute(0, 2, 1).flatten(
            1
        )  # by frame, then by channel, as the input lies in memory
        self._matrix = pack_linear(weight, conv.bias, form)

    def __call__(self, x_FE: Tensor) -> Tensor:
        padded = F.pad(x_FE, (0, 0, 1, 1)).contiguous()
        count = (len(padded) - _TAPS) // self._stride + 1
        steps = (self._stride * self._width, 1)
        return activated_linear(
            self._matrix, padded.as_strided((count, _TAPS * self._width), steps), "gelu"
        )


class _Layer:
    """Hold one layer's weights in the layout that this encoder uses."""

    def __init__(self, layer: Any, form: str, native: bool):
        self_attention = layer.self_attn
        self.norm, self.last_norm = (
            norm(layer.self_attn_layer_norm, native),
            norm(layer.final_layer_norm, native),
        )
        weight = torch.cat(
            [
                self_attention.q_proj.weight * self_attention.scaling,
                self_attention.k_proj.weight,
                self_attention.v_proj.weight,
            ]
        )
        bias = torch.cat(
            [
                self_attention.q_proj.bias * self_attention.scaling,
                torch.zeros_like(self_attention.v_proj.bias),
                self_attention.v_proj.bias,
            ]
        )
        self.qkv = pack_linear(weight, bias, form)
        self.out = pack_linear(self_attention.out_proj.weight, self_attention.out_proj.bias, form)
        self.up = pack_linear(layer.fc1.weight, layer.fc1.bias, form)
        self.down = pack_linear(layer.fc2.weight, layer.fc2.bias, form)
        self.activation = (
            gelu
            if native and isinstance(layer.activation_fn, GELUActivation)
            else layer.activation_fn
        )


class WhisperEncoder:
    """Encode with a transformers `WhisperForConditionalGeneration`.

    form: format of the layers' matrices, one of `motet_kernels.linear.linear`. With int8,
    convolutions are not rounded, but beside AMX to bfloat16, as attention is.
    """

    def __init__(self, model: Any, form: str):
        encoder = model.model.encoder
        self.num_heads: int = model.config.encoder_attention_heads
        self._on_gpu = gpu.is_gpu(model.device)
        dtype = encoder.conv1.weight.dtype
        native = self._on_gpu or dtype == torch.float32
        conv_format = dtype_name(dtype) if form == "int8" else form
        if form == "int8" and not self._on_gpu and native_kernels.is_multiplying_tiles():
            conv_format = "bfloat16"
        self._convolutions = [
            _Convolution(conv, conv_format) for conv in (encoder.conv1, encoder.conv2)
        ]
        self._positions = encoder.embed_positions.weight
        self._layers = [_Layer(layer, form, native) for layer in encoder.layers]
        self._norm = norm(encoder.layer_norm, native)
        self._rounded = form == "int8"

    def __call__(self, windows: Sequence[Tensor]) -> list[Tensor]:
        """Return states [S, E] of windows [M, F], F = 2S.

        Windows may be shorter than those that the model was made for.
        """
        inputs = [self._embed(features_MF) for features_MF in windows]
        if not self._on_gpu:
            return [self._apply_layers(x_SE, None) for x_SE in inputs]
        lengths = [len(x_SE) for x_SE in inputs]
        states_NE = self._apply_layers(torch.cat(inputs), Spans.of(lengths, inputs[0].device))
        return list(states_NE.split(lengths))

    def _embed(self, features_MF: Tensor) -> Tensor:
        """Return the input of the layers, [S, E]."""
        x_SE = features_MF.T.to(self._positions.dtype)
        for convolution in self._convolutions:
            x_SE = convolution(x_SE)
        output: Tensor = x_SE + self._positions[: len(x_SE)]
        return output

    def _apply_layers(self, x_NE: Tensor, spans: Spans | None) -> Tensor:
        """Apply the layers; return states [N, E] of the windows of `spans`, or of one window."""
        for layer in self._layers:
            x_NE = layer.out(self._attend(layer.qkv(layer.norm(x_NE)), spans), x_NE)
            x_NE = layer.down(layer.activation(layer.up(layer.last_norm(x_NE))), x_NE)
        return self._norm(x_NE)

    def _attend(self, qkv_NE: Tensor, spans: Spans | None) -> Tensor:
        """Attend with packed queries (already scaled), keys and values."""
        query, key, value = qkv_NE.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        if spans is None:
            return full_attention(query, key, value, scale=1.0, rounded=self._rounded).flatten(1)
        return packed_attention(query, key, value, spans, scale=1.0).flatten(1)
