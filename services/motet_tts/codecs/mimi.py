"""Decode Mimi and its relatives (PocketTTS's audio tokenizer) as a stream.

transformers decodes a whole sequence at once. Every layer of the decoder is causal, so decoding can
continue from saved state: a convolution needs the last inputs within its kernel's reach, the
transformer its keys and values within its window. With these kept per sequence the result is the
same, up to the order of float additions, however the frames are chunked; several sequences of
different age form one batch. On a GPU the convolutions are kernels (`seanet.py`) that keep their
own state.

Shapes: B sequences, C channels, N new steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from motet_shared.errors import ConfigError

from .attention_window import AttentionState, AttentionWindow
from .codec import Codec
from .seanet import FusedSeanet, fused_seanet
from .stream_context import StreamContext


@dataclass(slots=True)
class MimiState(AttentionState):
    """Hold the state of one sequence.

    inputs: last inputs of each convolution, `[1, C, reach]`.
    stream: replaces `inputs` where kernels compute.
    """

    inputs: list[Tensor] = field(default_factory=list)
    stream: StreamContext | None = None


class MimiDecoder(Codec):
    """Decode with a `MimiDecoderModel` of transformers or a similar `decoder`.

    latents: maps frames `[B, N, …]` to `[B, C, N]`.
    """

    def __init__(self, decoder: Any, latents: Callable[[Tensor], Tensor]):
        config = decoder.config
        _check(config)
        self.sample_rate = int(config.sampling_rate)
        self.frame_samples = int(config.sampling_rate / config.frame_rate)
        self._decoder = decoder
        self._latents = latents
        self._window_steps = int(config.sliding_window)
        self.fused = fused_seanet(decoder)

    def begin(self) -> MimiState:
        return MimiState() if self.fused is None else MimiState(stream=self.fused.contexts.begin())

    def decode(self, states: list[MimiState], frames_BN: Tensor) -> list[Tensor]:
        if self.fused is not None:
            return self._decode_fused(self.fused, states, frames_BN)
        inputs = _ConvContext(states)
        hidden_BCN = self._latents(frames_BN)
        if self._decoder.upsample is not None:
            hidden_BCN = inputs.apply(self._decoder.upsample, hidden_BCN)
        hidden_BNC, window = self._apply_transformer(states, hidden_BCN.transpose(1, 2))
        audio_BCN = _apply_layers(
            self._decoder.decoder_seanet.layers, hidden_BNC.transpose(1, 2), inputs
        )
        inputs.store()
        window.store()
        return list(audio_BCN[:, 0].float())

    def _decode_fused(
        self, fused: FusedSeanet, states: list[MimiState], frames_BN: Tensor
    ) -> list[Tensor]:
        streams = [state.stream for state in states if state.stream is not None]
        contexts = fused.contexts.next_contexts(streams)
        hidden_BNC = fused.upsample(self._latents(frames_BN).transpose(1, 2), contexts)
        hidden_BNC, window = self._apply_transformer(states, hidden_BNC)
        audio_BN = fused.decode(hidden_BNC, contexts).float()
        fused.contexts.commit(streams)
        window.store()
        return list(audio_BN)

    def _apply_transformer(
        self, states: list[MimiState], hidden_BNC: Tensor
    ) -> tuple[Tensor, AttentionWindow]:
        """Apply the transformer; return its output, and the window of keys and values to store."""
        steps, device = hidden_BNC.shape[1], hidden_BNC.device
        window = AttentionWindow(states, steps, self._window_steps, device)
        output: Tensor = self._decoder.decoder_transformer(
            hidden_BNC,
            attention_mask=window.mask,
            position_ids=window.positions,
            past_key_values=window,
            use_cache=True,
        ).last_hidden_state
        return output, window


class _ConvContext:
    """Keep the last inputs of all convolutions, in the order in which the decoder applies them."""

    def __init__(self, states: list[MimiState]):
        self._states = states
        self._kept: list[Tensor] = []

    def apply(self, layer: Any, hidden_BCN: Tensor) -> Tensor:
        """Apply one causal convolution, plain or transposed, to kept and new inputs."""
        conv = layer.conv
        reach = _reach(conv)
        if not reach:
            self._kept.append(hidden_BCN[..., :0])
            computed: Tensor = conv(hidden_BCN)
            return computed
        joined = torch.cat([self._context(hidden_BCN, reach), hidden_BCN], dim=-1)
        self._kept.append(joined[..., -reach:])
        output: Tensor = conv(joined)
        if isinstance(conv, nn.ConvTranspose1d):
            stride = conv.stride[0]
            output = output[..., reach * stride : joined.shape[-1] * stride]
        return output

    def _context(self, hidden_BCN: Tensor, reach: int) -> Tensor:
        """Return `[B, C, reach]`; zeros before the beginning, like the whole sequence's padding."""
        index, (_, channels, _) = len(self._kept), hidden_BCN.shape
        zeros = hidden_BCN.new_zeros(1, channels, reach)
        return torch.cat([state.inputs[index] if state.inputs else zeros for state in self._states])

    def store(self) -> None:
        parts = [kept.split(1) for kept in self._kept]
        for row, state in enumerate(self._states):
            state.inputs = [part[row] for part in parts]


def _apply_layers(layers: Any, hidden_BCN: Tensor, inputs: _ConvContext) -> Tensor:
    """Apply the convolutional decoder: convolutions, activations and residual blocks of both."""
    for layer in layers:
        if hasattr(layer, "conv"):
            hidden_BCN = inputs.apply(layer, hidden_BCN)
        elif hasattr(layer, "block"):
            residual = (
                inputs.apply(layer.shortcut, hidden_BCN)
                if hasattr(layer.shortcut, "conv")
                else hidden_BCN
            )
            hidden_BCN = residual + _apply_layers(layer.block, hidden_BCN, inputs)
        else:
            hidden_BCN = layer(hidden_BCN)
    return hidden_BCN


def _reach(conv: nn.Conv1d | nn.ConvTranspose1d) -> int:
    """Return how many inputs before the newest one an output depends on."""
    if isinstance(conv, nn.ConvTranspose1d):
        return -(-conv.kernel_size[0] // conv.stride[0]) - 1
    return (conv.kernel_size[0] - 1) * conv.dilation[0]


def _check(config: Any) -> None:
    """Raise ConfigError for a decoder that looks ahead or pads with anything but zeros.

    Such a decoder cannot stream exactly.
    """
    for field_name, needed in (
        ("use_causal_conv", True),
        ("pad_mode", "constant"),
        ("trim_right_ratio", 1.0),
    ):
        if (value := getattr(config, field_name)) != needed:
            raise ConfigError(
                f"codec: {field_name}={value!r} cannot be decoded as a stream; it must be {needed!r}"
            )
