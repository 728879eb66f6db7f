"""Multiply one input by weights in several formats, side by side in one result.

In GGUF's usual mixtures, for example, queries and keys have four bits, values six. Combined into
one product, they take the same path through a layer as weights of one format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.linear.code_linear import CodeLinear
from motet_kernels.linear.grouped_linear import GroupedLinear
from motet_kernels.linear.linear import Linear
from motet_kernels.runtime.errors import KernelError


class MixedLinear(Linear):
    """Compute the products of `parts`, concatenated.

    All parts have the same number of input features and are on one device. Raises `KernelError` on
    different numbers of input features.
    """

    def __init__(self, parts: Sequence[CodeLinear | GroupedLinear]):
        nn.Module.__init__(self)
        self.parts: Sequence[CodeLinear | GroupedLinear] = nn.ModuleList(parts)  # type: ignore[assignment]
        widths = {part.in_features for part in parts}
        if len(widths) != 1:
            raise KernelError(
                f"parts: they take in {sorted(widths)} features, and must all take in as many"
            )
        self.in_features, self.out_features = widths.pop(), sum(part.out_features for part in parts)
        self.format = "mixed"
        self.inputs = min((part.inputs for part in parts), key=len)
        self.is_exact = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product as `Linear.forward` does."""
        shape = self.check(x, residual)
        if gpu.takes(x) or not all(part.is_native(x) for part in self.parts):
            return self.forward_torch(x, residual)
        out, column = x.new_empty(shape), 0
        for part in self.parts:
            part.write(x, residual, out, column)
            column += part.out_features
        return out

    def forward_torch(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute each part by itself and concatenate the results."""
        out = torch.cat([part(x) for part in self.parts], dim=-1)
        return out if residual is None else out + residual

    def round_input(self, x_MK: Tensor) -> Tensor:
        """Raise KernelError: each part rounds in its own way."""
        raise KernelError("x_MK: each part rounds it for itself; call the parts")

    def weight(self, start: int = 0, stop: int | None = None) -> Tensor:
        return torch.cat([part.weight() for part in self.parts])[start:stop]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __setstate__(self, state: dict[str, object]) -> None:
        nn.Module.__setstate__(self, state)

    def _apply(self, *args: object, **kwargs: object) -> MixedLinear:
        raise KernelError(
            "device: packed parts stay on their device, in their formats; pack them again"
        )
