"""Compute with the part of a module that a rank holds, together with the other ranks.

Each module here wraps the one it is a part of, under the name of `part`, so that a matrix is packed
like any other.

Shapes: N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motet_llm.parallel.collectives import Collectives

from .shares import Share

PART = "part"


class _Part(nn.Module):
    """Wrap a part of a module."""

    def __init__(self, part: nn.Module, group: Collectives):
        super().__init__()
        self.part = part
        self.group = group


class SummedLinear(_Part):
    """Multiply a rank's columns by its inputs, and sum over the ranks.

    columns: those of a whole input that are the rank's; None: inputs are the rank's own.
    """

    def __init__(self, part: nn.Module, group: Collectives, columns: Share | None = None):
        super().__init__(part, group)
        self.columns = columns

    @property
    def summed(self) -> nn.Module:
        """Return what is summed over the ranks, for fused layers: a packed matrix."""
        return self.part

    @property
    def format(self) -> str:
        """Return the format of the packed matrix."""
        return str(self.part.format)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the whole product `[..., N]`; the residual is added once."""
        if self.columns is not None:
            x = x[..., self.columns.begin : self.columns.end]
        if residual is None:
            return self.group.sum(self.part(x))
        added = (residual,) if self.group.rank == 0 else ()
        return self.group.sum(self.part(x, *added))


class GatheredLinear(_Part):
    """Multiply by a rank's rows, and join the outputs of all ranks; widths: of their outputs.

    is_for_first: only the first rank of the stage needs the whole.
    """

    def __init__(
        self, part: nn.Module, group: Collectives, widths: list[int], *, is_for_first: bool
    ):
        super().__init__(part, group)
        self.widths = widths
        self._join = group.join_at_first if is_for_first else group.join

    def forward(self, x: Tensor) -> Tensor:
        return self._join(self.part(x), self.widths)


class SummedExperts(_Part):
    """Compute with a rank's part of every expert, and sum over the ranks."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return self.group.sum(self.part(*args, **options))


class LocalExperts(_Part):
    """Compute the experts of a rank for the tokens that are routed to them, and sum over the ranks.

    experts: those of the rank.
    """

    def __init__(self, part: nn.Module, group: Collectives, experts: Share):
        super().__init__(part, group)
        self.experts = experts

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the results of all experts; `index_Tk` numbers those of the whole model."""
        held_Tk = (index_Tk >= self.experts.begin) & (index_Tk < self.experts.end)
        own_Tk = torch.where(held_Tk, index_Tk - self.experts.begin, self.experts.width)
        return self.group.sum(self.part(hidden, own_Tk, weights_Tk.masked_fill(~held_Tk, 0)))
