"""Pack the matrices of one model, or take them as an earlier start has packed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import pack_linear
from motet_llm.models.fused_modules import FusedModules

from .packed_file import PackedModel


class Packer:
    """Return packed matrices by the names of their modules.

    form: a format of `pack_linear`. device: where they compute. precise: codes of 4 bits take in 16
    bits. stored: what was packed before, if anything was. `made` collects what is returned. fused:
    which modules were replaced afterwards, if any were compared. before_each: called before each
    matrix; what it raises ends the packing.

    Shapes: N output features, K input features, E experts.
    """

    def __init__(
        self,
        form: str,
        device: torch.device,
        *,
        precise: bool = False,
    ):
        self.form, self.device, self.precise = form, device, precise
        self.stored: PackedModel | None = None
        self.made: dict[str, Linear] = {}
        self.fused: FusedModules | None = None
        self.before_each: Callable[[], object] = lambda: None

    def take(self, name: str, shape: tuple[int, int], pack: Callable[[], Linear]) -> Linear:
        """Return the stored matrix `name` if it has this shape `[N, K]`, else what `pack` returns."""
        self.before_each()
        found = None if self.stored is None else self.stored.matrices.get(name)
        if found is None or (found.out_features, found.in_features) != shape:
            found = pack()
        self.made[name] = found
        return found

    def linear(self, name: str, weights: Sequence[Tensor], bias_N: Tensor | None) -> Linear:
        """Return one matrix with the rows of all `weights`, packed in this packer's format."""

        def pack() -> Linear:
            rows_NK = torch.cat([weight.detach() for weight in weights])
            return pack_linear(rows_NK, bias_N, self.form, self.device)

        shape = (sum(len(weight) for weight in weights), weights[0].shape[1])
        return self.take(name, shape, pack)

    def stack(self, name: str, weights_ENK: Tensor, bias_EN: Tensor | None) -> list[Linear]:
        """Return a matrix for each expert of a stack."""
        biases = [None] * len(weights_ENK) if bias_EN is None else list(bias_EN.detach())
        return [
            self.linear(f"{name}.{number}", [matrix], bias)
            for number, (matrix, bias) in enumerate(zip(weights_ENK, biases, strict=True))
        ]
