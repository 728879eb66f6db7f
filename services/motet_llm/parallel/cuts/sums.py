"""Sum the products of a tensor-parallel cut over the ranks: what of a matrix is a rank's, and how."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from motet_llm.parallel.collectives import Collectives

from .cut_modules import SummedExperts, SummedLinear
from .shares import Share, divide


class Sums(Protocol):
    """Decide how features are divided among ranks, and how the ranks' products are summed."""

    def divide(self, size: int) -> Share:
        """Return the rank's part of features that do not belong to heads."""

    def linear(
        self, linear: nn.Linear, own: Share, *, heads: bool, splits_input: bool
    ) -> nn.Module:
        """Return a module that sums a matrix over the ranks, given the whole matrix.

        own: the rank's input features. heads: they belong to heads. splits_input: inputs are whole;
        otherwise they are the rank's own.
        """

    def parts(self, module: nn.Module) -> dict[str, Share]:
        """Return the input features of each matrix in a module of `linear`, if they are several.

        By their names within it.
        """

    def experts(self, experts: nn.Module) -> nn.Module:
        """Return a module that sums a rank's part of all experts. Raises ConfigError."""


class PlainSums:
    """Sum in an order that depends on the number of ranks."""

    def __init__(self, group: Collectives):
        self._group = group

    def divide(self, size: int) -> Share:
        return divide(size, self._group.rank, self._group.size)

    def linear(
        self, linear: nn.Linear, own: Share, *, heads: bool, splits_input: bool
    ) -> nn.Module:
        part = columns_of(linear, own, bias=self._group.rank == 0)
        return SummedLinear(part, self._group, own if splits_input else None)

    def parts(self, module: nn.Module) -> dict[str, Share]:
        return {}

    def experts(self, experts: nn.Module) -> nn.Module:
        return SummedExperts(experts, self._group)


def columns_of(linear: nn.Linear, own: Share, *, bias: bool) -> nn.Linear:
    """Return the part of a matrix for these input features; bias: it adds the bias, if there is one."""
    has_bias = bias and linear.bias is not None
    part = nn.Linear(own.width, linear.out_features, bias=has_bias, device="meta")
    part.weight = nn.Parameter(linear.weight.data[:, own.begin : own.end], requires_grad=False)
    if has_bias:
        part.bias = nn.Parameter(linear.bias.data, requires_grad=False)
    return part
