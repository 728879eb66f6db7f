"""Compute several projections of one input as one product."""

from __future__ import annotations

from torch import Tensor, nn

from motet_kernels.linear.linear import Linear


class JoinedLinear(nn.Module):
    """Compute a product once, for the first part that is requested, and keep it for the others."""

    def __init__(self, linear: Linear):
        super().__init__()
        self.linear = linear
        self._input: Tensor | None = None
        self._output: Tensor | None = None

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return features `start` to `stop` of the product with `x`.

        The last part of the product releases input and output.
        """
        if self._output is None or self._input is not x:
            self._input, self._output = x, self.linear(x)
        part = self._output[..., start:stop]
        if stop == self.linear.out_features:
            self._input = self._output = None
        return part


class JoinedPart(nn.Module):
    """Return one of the projections that a `JoinedLinear` computes."""

    def __init__(self, joined: JoinedLinear, start: int, stop: int):
        super().__init__()
        self.joined = joined
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        return self.joined.part(x, self.start, self.stop)
