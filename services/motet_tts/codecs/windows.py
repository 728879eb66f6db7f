"""Decode a convolutional network that looks ahead as a stream: windows with context on both sides.

A sample depends on a bounded number of frames on either side of its own. A window that has them
equals that part of the whole; where the sequence begins or ends, so does the window.

Shapes: B sequences, N frames of a window, … a frame's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .codec import Codec


@dataclass(slots=True)
class Window:
    """Hold the frames `[N, …]` of a sequence that are still needed; samples of `due` on are due."""

    frames: Tensor | None = None
    due: int = 0

    @property
    def count(self) -> int:
        """Return the number of frames."""
        return 0 if self.frames is None else len(self.frames)


class WindowCodec(Codec):
    """Decode with `network`, which maps frames `[B, N, …]` to samples `[B, N * frame_samples]`.

    reach: frames on each side that a sample depends on, at most. before: so many before it, if these
    are others. align: windows begin at multiples of so many frames.
    """

    def __init__(
        self,
        network: Callable[[Tensor], Tensor],
        *,
        sample_rate: int,
        frame_samples: int,
        reach: int,
        before: int | None = None,
        align: int = 1,
    ):
        self.sample_rate, self.frame_samples = sample_rate, frame_samples
        self._network = network
        self._reach = reach
        self._before = reach if before is None else before
        self._align = align
        self.context = self._reach + self._before

    def begin(self) -> Window:
        return Window()

    def decode(self, states: list[Window], frames_BN: Tensor) -> list[Tensor]:
        windows = [
            Window(new if old.frames is None else torch.cat([old.frames, new]), old.due)
            for old, new in zip(states, frames_BN, strict=True)
        ]
        groups: dict[tuple[int, int], list[int]] = {}
        for row, window in enumerate(windows):
            groups.setdefault((window.due, window.count), []).append(row)
        samples = [torch.zeros(0, device=frames_BN.device)] * len(states)
        for (due, count), rows in groups.items():
            if count - self._reach <= due:
                continue
            decoded = self._decode([windows[row] for row in rows], due, count - self._reach)
            for row, part in zip(rows, decoded, strict=True):
                samples[row] = part
                self._advance(windows[row], count - self._reach)
        for state, window in zip(states, windows, strict=True):
            state.frames, state.due = window.frames, window.due
        return samples

    def finish(self, state: Window) -> Tensor | None:
        if state.due == state.count:
            return None
        return self._decode([state], state.due, state.count)[0]

    def _decode(self, windows: list[Window], begin: int, end: int) -> list[Tensor]:
        frames_BN = torch.stack([window.frames for window in windows if window.frames is not None])
        size = self.frame_samples
        return list(self._network(frames_BN).float()[:, begin * size : end * size])

    def _advance(self, window: Window, due: int) -> None:
        """Drop the frames that no further sample depends on."""
        assert window.frames is not None
        first = max(0, due - self._before) // self._align * self._align
        window.frames, window.due = window.frames[first:], due - first


def reach_of(layers: Iterable[nn.Module]) -> int:
    """Return the reach, in frames, of convolutions in the order in which they are applied."""
    reach = 0
    for conv in reversed([layer for layer in layers if isinstance(layer, _CONVOLUTIONS)]):
        width = (conv.kernel_size[0] - 1) * conv.dilation[0] + 1
        if isinstance(conv, nn.ConvTranspose1d):
            reach = -(-(reach + width) // conv.stride[0])
        else:
            reach += width // 2
    return reach


def hifigan_reach(config: Any) -> int:
    """Return the reach, in frames, of a HiFi-GAN, whose residual blocks are parallel."""
    reach = 3  # the last convolution, of width 7
    widest = max(
        sum((width - 1) * dilation // 2 + (width - 1) // 2 for dilation in dilations)
        for width, dilations in zip(
            config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True
        )
    )
    for rate, width in reversed(
        list(zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True))
    ):
        reach = -(-(reach + widest + width) // rate)
    return reach + 3  # the first convolution


_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
