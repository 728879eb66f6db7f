"""Decode latents of sentences piece by piece with a HiFi-GAN: as a stream, or in windows.

On a CPU the vocoder keeps each layer's state. On a GPU, where many small launches cost more than
what they save, a piece is decoded with context on both sides, equal pieces in one pass.

Shapes: T frames, F latent dimensions, N samples, E speaker dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from motet_kernels import gpu

from .hifigan import FusedVocoder
from .hifigan_stream import Kept, StreamedVocoder
from .windows import hifigan_reach


@dataclass(slots=True, eq=False)
class Latents:
    """Hold the latents of a sentence, and how far they are decoded.

    frames: `[F, T]`.
    speaker: `[1, E, 1]`.
    at: frames that were decoded.
    kept: the vocoder's state after them.
    """

    frames: Tensor
    speaker: Tensor | None
    at: int = 0
    kept: Kept = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Return T."""
        return self.frames.shape[1]


class Vocoder(Protocol):
    """Define how pieces are decoded."""

    def due(self, latents: Latents, first: int, later: int) -> int:
        """Return where the next piece ends: `first` frames on at the beginning, else `later`."""

    def group(self, latents: Latents, end: int) -> tuple[int, ...]:
        """Return what is equal for sentences whose next pieces are decoded together."""

    def decode(self, group: Sequence[Latents], ends: Sequence[int]) -> list[Tensor]:
        """Return float32 samples `[N]` that are complete with the frames up to each end.

        Sets `at` and `kept` unless it raises.
        """


def vocoder_of(decoder: Any) -> Vocoder:
    """Return the way to decode with a `VitsHifiGan` where its weights are."""
    weight = decoder.conv_pre.weight
    if weight.device.type == "cpu" and not gpu.takes(weight):
        return _Streams(decoder)
    return _Windows(decoder, FusedVocoder(decoder) if gpu.takes(weight) else decoder)


class _Streams:
    """Decode without context. The first piece has in addition what the network looks ahead."""

    def __init__(self, decoder: Any):
        self._network, self._ahead = StreamedVocoder(decoder), hifigan_reach(decoder.config)

    def due(self, latents: Latents, first: int, later: int) -> int:
        size = later if latents.at else first + self._ahead
        return min(latents.total, latents.at + size)

    def group(self, latents: Latents, end: int) -> tuple[int, ...]:
        return ()

    def decode(self, group: Sequence[Latents], ends: Sequence[int]) -> list[Tensor]:
        made = [self._piece(one, end) for one, end in zip(group, ends, strict=True)]
        for one, end, (_, kept) in zip(group, ends, made, strict=True):
            one.at, one.kept = end, kept
        return [samples_N for samples_N, _ in made]

    def _piece(self, one: Latents, end: int) -> tuple[Tensor, Kept]:
        if not one.total:
            return torch.zeros(0), {}
        frames_TF = one.frames[:, one.at : end].T
        return self._network.decode(one.kept, frames_TF, one.speaker, last=end == one.total)


class _Windows:
    """Decode with context; a piece has at least as many frames as that, three times so later on."""

    def __init__(self, decoder: Any, network: Callable[[Tensor, Tensor | None], Tensor]):
        self._network, self._context = network, hifigan_reach(decoder.config)
        self._size = 1  # samples of a frame
        for rate in decoder.config.upsample_rates:
            self._size *= rate

    def due(self, latents: Latents, first: int, later: int) -> int:
        size = max(3 * self._context, later) if latents.at else max(self._context, first)
        return min(latents.total, latents.at + size)

    def group(self, latents: Latents, end: int) -> tuple[int, ...]:
        low, high = self._window(latents, end)
        return latents.at - low, end - latents.at, high - end

    def decode(self, group: Sequence[Latents], ends: Sequence[int]) -> list[Tensor]:
        windows = [self._window(one, end) for one, end in zip(group, ends, strict=True)]
        if windows[0][0] == windows[0][1]:
            return [torch.zeros(0, device=one.frames.device) for one in group]
        parts = [one.frames[:, low:high] for one, (low, high) in zip(group, windows, strict=True)]
        speakers = [one.speaker for one in group if one.speaker is not None]
        speaker_BE1 = torch.cat(speakers) if speakers else None
        samples_BN = self._network(torch.stack(parts), speaker_BE1).squeeze(1).float()
        first, count = group[0].at - windows[0][0], ends[0] - group[0].at
        for one, end in zip(group, ends, strict=True):
            one.at = end
        due_BN = samples_BN[:, first * self._size : (first + count) * self._size]
        return [samples_N.clone() for samples_N in due_BN]

    def _window(self, latents: Latents, end: int) -> tuple[int, int]:
        """Return begin and end of the frames that the piece needs."""
        return max(0, latents.at - self._context), min(latents.total, end + self._context)
