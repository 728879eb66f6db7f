"""Run HiFi-GAN on a GPU (VITS, SpeechT5): one launch per convolution, all else fused into it.

Source of the network: HiFi-GAN (Kong et al. 2020), as transformers' `VitsHifiGan` and
`SpeechT5HifiGan` hold it.

Shapes: B sentences, T frames, N steps, F latent dimensions, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from motet_kernels.audio.codec_conv import convolve
from motet_kernels.audio.packed_conv import Activation, PackedConv

_LAST_SLOPE = 0.01  # torch's default, since transformers names none


class FusedVocoder:
    """Run a `VitsHifiGan`; weights that are not packed are shared with it."""

    def __init__(self, decoder: Any):
        self._first, self._last = PackedConv.of(decoder.conv_pre), PackedConv.of(decoder.conv_post)
        self._speaker = getattr(decoder, "cond", None)
        self._up = [PackedConv.of(up) for up in decoder.upsampler]
        self._slope = Activation("leaky_relu", decoder.config.leaky_relu_slope)
        count = decoder.num_kernels
        blocks = [_Block(block) for block in decoder.resblocks]
        self._blocks = [blocks[first : first + count] for first in range(0, len(blocks), count)]

    def __call__(self, latents_BFT: Tensor, speaker_BE1: Tensor | None) -> Tensor:
        """Return `[B, 1, N]`, as the module does."""
        latents_BTF = latents_BFT.mT.contiguous()
        added = None
        if speaker_BE1 is not None and self._speaker is not None:
            added = self._speaker(speaker_BE1).mT.contiguous().expand(-1, latents_BTF.shape[1], -1)
        hidden_BNC = convolve(latents_BTF, self._first, residual_BMO=added)
        for up, blocks in zip(self._up, self._blocks, strict=True):
            hidden_BNC = convolve(hidden_BNC, up, self._slope)
            hidden_BNC = sum(
                (block(hidden_BNC) for block in blocks[1:]), blocks[0](hidden_BNC)
            ) / len(blocks)
        return torch.tanh(
            convolve(hidden_BNC, self._last, Activation("leaky_relu", _LAST_SLOPE))
        ).mT


class _Block:
    """Apply a residual block: pairs of convolutions, each pair added to its input."""

    def __init__(self, block: Any):
        pairs = zip(block.convs1, block.convs2, strict=True)
        self._pairs = [(PackedConv.of(first), PackedConv.of(second)) for first, second in pairs]
        self._slope = Activation("leaky_relu", block.leaky_relu_slope)

    def __call__(self, hidden_BNC: Tensor) -> Tensor:
        for first, second in self._pairs:
            inner_BNC = convolve(hidden_BNC, first, self._slope)
            hidden_BNC = convolve(inner_BNC, second, self._slope, residual_BMO=hidden_BNC)
        return hidden_BNC
