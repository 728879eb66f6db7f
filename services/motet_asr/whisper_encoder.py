"""Whisper's encoder on the native kernels: transformers' weights, packed once, and attention to all frames.

M mel bins · F feature frames of 10 ms · S encoder frames of 20 ms · E model size · H heads · D head size. Windows are
encoded one by one: each has rows enough to fill the processor, and its states are the same bits in any company.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.full_attention import full_attention
from motet_kernels.linear import Linear

_TAPS = 3  # frames that a convolution takes in


class _Convolution:
    """A convolution of three frames as one matrix over frames that lie side by side, GELU included."""

    def __init__(self, conv: nn.Conv1d, form: str):
        self._stride = int(conv.stride[0])
        self._width = conv.in_channels
        weight = conv.weight.permute(0, 2, 1).flatten(1)  # by frame, then by channel, as the input lies in memory
        self._matrix = Linear.pack(weight, conv.bias, form)

    def __call__(self, x_FE: Tensor) -> Tensor:
        padded = F.pad(x_FE, (0, 0, 1, 1)).contiguous()
        count = (len(padded) - _TAPS) // self._stride + 1
        steps = (self._stride * self._width, 1)
        return F.gelu(self._matrix(padded.as_strided((count, _TAPS * self._width), steps)))


class _Layer:
    """One layer's weights, as this encoder uses them."""

    def __init__(self, layer: Any, form: str):
        own = layer.self_attn
        self.norm, self.last_norm = layer.self_attn_layer_norm, layer.final_layer_norm
        weight = torch.cat([own.q_proj.weight * own.scaling, own.k_proj.weight, own.v_proj.weight])
        bias = torch.cat([own.q_proj.bias * own.scaling, torch.zeros_like(own.v_proj.bias), own.v_proj.bias])
        self.qkv = Linear.pack(weight, bias, form)
        self.out = Linear.pack(own.out_proj.weight, own.out_proj.bias, form)
        self.up = Linear.pack(layer.fc1.weight, layer.fc1.bias, form)
        self.down = Linear.pack(layer.fc2.weight, layer.fc2.bias, form)
        self.activation = layer.activation_fn


class WhisperEncoder:
    """Takes a transformers `WhisperForConditionalGeneration`.

    form: of the matrices of the layers, one of `motet_kernels.linear`. The convolutions are never rounded to integers.
    """

    def __init__(self, model: Any, form: str):
        encoder = model.model.encoder
        self.num_heads: int = model.config.encoder_attention_heads
        exact = form if form in ("float32", "bfloat16") else str(encoder.conv1.weight.dtype).removeprefix("torch.")
        self._convolutions = [_Convolution(conv, exact) for conv in (encoder.conv1, encoder.conv2)]
        self._positions = encoder.embed_positions.weight
        self._layers = [_Layer(layer, form) for layer in encoder.layers]
        self._norm = encoder.layer_norm
        self._rounded = form == "int8"

    def __call__(self, features_MF: Tensor) -> Tensor:
        """States [S, E] of one window, which may be shorter than those that the model was made for: F = 2S."""
        x_SE = features_MF.T.to(self._positions.dtype)
        for convolution in self._convolutions:
            x_SE = convolution(x_SE)
        x_SE = x_SE + self._positions[: len(x_SE)]
        for layer in self._layers:
            x_SE = layer.out(self._attended(layer.qkv(layer.norm(x_SE))), x_SE)
            x_SE = layer.down(layer.activation(layer.up(layer.last_norm(x_SE))), x_SE)
        normed: Tensor = self._norm(x_SE)
        return normed

    def _attended(self, qkv_SE: Tensor) -> Tensor:
        """What the heads make of queries, which are scaled already, keys and values that lie side by side."""
        query_SHD, key_SHD, value_SHD = qkv_SE.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        return full_attention(query_SHD, key_SHD, value_SHD, scale=1.0, rounded=self._rounded).flatten(1)
