"""Run HiFi-GAN as a stream on a CPU: every step of every layer is computed once.

Each convolution keeps the inputs that its next outputs need, so a piece costs no context. Samples
follow their frames by what the network looks ahead. Source of the network: HiFi-GAN (Kong et al.
2020), as transformers' `VitsHifiGan` holds it.

Shapes: T frames, F latent dimensions, N steps, C channels, E speaker dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from motet_kernels.audio.packed_conv import PackedConv
from motet_kernels.audio.valid_conv import Steps, ValidConv, convolve_valid

Kept = dict[int, Tensor]  # by layer: steps that are needed again; never written to in place

_LAST_SLOPE = 0.01  # torch's default, since transformers names none


class StreamedVocoder:
    """Run a `VitsHifiGan` in float32; the state of a sentence is a `Kept`, empty at first."""

    def __init__(self, decoder: Any):
        places = count()
        share = (
            1 / decoder.num_kernels
        )  # a mean is taken by the layer after it: leaky ReLU is linear in a factor
        self._first = _Layer(places, decoder.conv_pre)
        self._speaker = getattr(decoder, "cond", None)
        slope = float(decoder.config.leaky_relu_slope)
        self._stages = []
        for index, up in enumerate(decoder.upsampler):
            blocks = decoder.resblocks[index * decoder.num_kernels :][: decoder.num_kernels]
            layer = _Layer(places, up, slope, share if index else 1.0)
            self._stages.append(
                (layer, [_Block(places, block) for block in blocks], [next(places) for _ in blocks])
            )
        self._last = _Layer(places, decoder.conv_post, _LAST_SLOPE, share)

    def decode(
        self, kept: Kept, frames_TF: Tensor, speaker_1E1: Tensor | None, *, last: bool
    ) -> tuple[Tensor, Kept]:
        """Return the samples `[N]` that are complete with these frames, and the next state.

        After the last frames these are all that are left. `kept` stays as it is.
        """
        kept = dict(kept)
        hidden_NC = self._first(kept, frames_TF.float().contiguous(), last)
        if speaker_1E1 is not None and self._speaker is not None:
            hidden_NC = hidden_NC + self._speaker(speaker_1E1)[:, :, 0].float()
        for up, blocks, waiting in self._stages:
            hidden_NC = up(kept, hidden_NC, last)
            parts = [block(kept, hidden_NC, last) for block in blocks]
            hidden_NC = _summed(kept, waiting, parts)
        return torch.tanh(self._last(kept, hidden_NC, last))[:, 0], kept


class _Layer:
    """Apply a convolution to a stream, with zeros before its first step and after its last one."""

    def __init__(self, places: Iterator[int], module: Any, slope: float = 1.0, factor: float = 1.0):
        packed = PackedConv.of(module)
        self._place = next(places)
        self._conv = ValidConv.of(packed.taps.double() * factor, packed.bias, packed.dilation)
        self._slope = slope
        self._stride, self._cut = packed.stride, packed.cut
        self._before = packed.left
        self._after = packed.more + packed.reach - packed.left

    def __call__(
        self, kept: Kept, x_NC: Tensor, last: bool, residual: Steps | None = None
    ) -> Tensor:
        """Return the steps that are complete. The residual has as many steps as these, or more."""
        before = kept.get(self._place, self._before)
        begins = isinstance(before, int)
        if begins and not len(x_NC):
            return x_NC.new_empty(0, self._conv.outputs // self._stride)
        steps = Steps(before, x_NC, self._after if last else 0)
        made = max(0, len(steps) - self._conv.reach)
        kept[self._place] = steps.tail(made)
        if not made:
            return x_NC.new_empty(0, self._conv.outputs // self._stride)
        out_NC = convolve_valid(steps, self._conv, self._slope, residual)
        out_NC = out_NC.view(made * self._stride, -1)
        first, end = self._cut[0] if begins else 0, self._cut[1] if last else 0
        return out_NC[first : len(out_NC) - end]


class _Block:
    """Apply a residual block: pairs of convolutions, each pair added to its input."""

    def __init__(self, places: Iterator[int], block: Any):
        slope = float(block.leaky_relu_slope)
        self._pairs = [
            (_Layer(places, first, slope), _Layer(places, second, slope), next(places))
            for first, second in zip(block.convs1, block.convs2, strict=True)
        ]

    def __call__(self, kept: Kept, hidden_NC: Tensor, last: bool) -> Tensor:
        for first, second, place in self._pairs:
            waiting = Steps(kept.get(place, 0), hidden_NC)
            hidden_NC = second(kept, first(kept, hidden_NC, last), last, waiting)
            kept[place] = waiting.tail(len(hidden_NC))
        return hidden_NC


def _summed(kept: Kept, places: list[int], parts: list[Tensor]) -> Tensor:
    """Sum blocks of different reach as far as all are there."""
    waiting = [
        part if place not in kept else torch.cat([kept[place], part])
        for place, part in zip(places, parts, strict=True)
    ]
    steps = min(map(len, waiting))
    for place, part_NC in zip(places, waiting, strict=True):
        kept[place] = part_NC[steps:].clone()
    total_NC = waiting[0][:steps]
    for part_NC in waiting[1:]:
        total_NC += part_NC[:steps]
    return total_NC
