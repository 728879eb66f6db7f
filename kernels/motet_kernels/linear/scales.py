"""Hold scales and shifts of weights in codes: a number per output and group of inputs.

Some formats state them in two levels: a small integer per group, times a number that several groups
share. They are kept so, since written out in float32 they would take as much memory as the codes.

Shapes: N output features, G groups of inputs, S spans of groups, P = ⌈N/32⌉ panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.linear.panels import PANEL
from motet_kernels.runtime.memory import huge_zeros

# The native kernel's numbers for types (csrc/numbers.h).
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_SPAN_KINDS = {torch.float32: 3, torch.float16: 4}  # by the type of what spans share


@dataclass(frozen=True, slots=True)
class SpanScales:
    """Numbers in two levels: `coarse_NS[:, g // span] · fine_NG[:, g]`; fine int8, coarse floats."""

    fine_NG: Tensor
    coarse_NS: Tensor
    span: int

    @property
    def shape(self) -> torch.Size:
        return self.fine_NG.shape

    def float(self) -> Tensor:
        """Return the scales of N rows and G groups, float32 `[N, G]`."""
        wide_NG = self.coarse_NS.repeat_interleave(self.span, 1)[:, : self.shape[1]]
        return wide_NG.float() * self.fine_NG.float()


Scales = Tensor | SpanScales


def dense(scales: Scales) -> Tensor:
    """Return scales in float32 `[N, G]`."""
    return scales.float()


def rows(scales: Scales, rows_M: Tensor | slice) -> Scales:
    """Return the scales of some outputs."""
    if isinstance(scales, Tensor):
        return scales[rows_M]
    return replace(scales, fine_NG=scales.fine_NG[rows_M], coarse_NS=scales.coarse_NS[rows_M])


def alike(first: Scales | None, second: Scales | None) -> bool:
    """Return True if two scales are held in the same way, so that they can be stacked."""
    if isinstance(first, SpanScales) and isinstance(second, SpanScales):
        return first.span == second.span
    return type(first) is type(second)


def stacked(parts: Sequence[Scales]) -> Scales:
    """Return the scales of the outputs of all parts, which are `alike`."""
    spans = [part for part in parts if isinstance(part, SpanScales)]
    if len(spans) < len(parts):
        return torch.cat([dense(part) for part in parts])
    fine_NG = torch.cat([part.fine_NG for part in spans])
    return SpanScales(fine_NG, torch.cat([part.coarse_NS for part in spans]), spans[0].span)


def repeated(scales: Scales, times: int, groups: int) -> Scales:
    """Return each group's number `times` times, the first `groups` of these."""
    if isinstance(scales, Tensor):
        return scales.repeat_interleave(times, 1)[:, :groups].contiguous()
    fine_NG = scales.fine_NG.repeat_interleave(times, 1)[:, :groups].contiguous()
    return SpanScales(fine_NG, scales.coarse_NS, scales.span * times)


def narrowed(scales_NG: Tensor) -> Tensor:
    """Return float32 scales in 16 bits where that is exact."""
    for kind in (torch.float16, torch.bfloat16):
        if torch.equal(scales_NG.to(kind).float(), scales_NG):
            return scales_NG.to(kind)
    return scales_NG


class PackedScales(nn.Module):
    """Hold scales in panels, in the narrowest exact type.

    fine: `[P, G, 32]`. coarse: `[P, S, 32]`; None for scales of one level.
    """

    fine: Tensor
    coarse: Tensor | None

    def __init__(self, scales: Scales):
        super().__init__()
        if isinstance(scales, SpanScales):
            self.span, fine_NG = scales.span, scales.fine_NG
            coarse_NS = scales.coarse_NS.float()
            if torch.equal(coarse_NS.half().float(), coarse_NS):  # as all GGUF blocks have them
                coarse_NS = coarse_NS.half()
            self.register_buffer("coarse", _panels(coarse_NS))
        else:
            self.span, fine_NG = 1, narrowed(scales)
            self.register_buffer("coarse", None)
        self.register_buffer("fine", _panels(fine_NG))

    @classmethod
    def of_panels(cls, fine: Tensor, coarse: Tensor | None, span: int) -> PackedScales:
        """Return scales that keep these tensors; `stored.py` checks that they fit."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.span = span
        made.register_buffer("coarse", coarse)
        made.register_buffer("fine", fine)
        return made

    def arguments(self) -> tuple[int, int, int | None]:
        """Return the native kernel's arguments: type, fine and coarse numbers."""
        if self.coarse is None:
            return _KINDS[self.fine.dtype], self.fine.data_ptr(), None
        return _SPAN_KINDS[self.coarse.dtype], self.fine.data_ptr(), self.coarse.data_ptr()

    def numbers(self) -> Tensor:
        """Return the numbers in float32 `[32 P, G]`, padding included."""
        fine_NG = self.fine.transpose(1, 2).flatten(0, 1)
        coarse = None if self.coarse is None else self.coarse.transpose(1, 2).flatten(0, 1)
        return self._product(fine_NG, coarse)

    def of_rows(self, rows_M: Tensor) -> Tensor:
        """Return the numbers of some outputs, float32 `[M, G]`."""
        panel, column = rows_M // PANEL, rows_M % PANEL
        coarse = None if self.coarse is None else self.coarse[panel, :, column]
        return self._product(self.fine[panel, :, column], coarse)

    def _product(self, fine_NG: Tensor, coarse_NS: Tensor | None) -> Tensor:
        if coarse_NS is None:
            return fine_NG.float()
        return SpanScales(fine_NG, coarse_NS, self.span).float()


def _panels(numbers_NG: Tensor) -> Tensor:
    padded = F.pad(numbers_NG, (0, 0, 0, -len(numbers_NG) % PANEL))
    panels = padded.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return huge_zeros(tuple(panels.shape), panels.dtype).copy_(panels)
