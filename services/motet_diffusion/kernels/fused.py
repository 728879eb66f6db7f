"""Speed up a model on a GPU with `motet_kernels`: fuse norms and gates with what follows them.

Norms return a `DeferredTensor`, and so do the parts of blocks whose results may be gated. The
candidates are found by trial: one pass runs with all of them replaced, one with the original model.
If both agree, the replacements that were used stay; if they differ, or a pass fails, the model is
restored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from motet_kernels import gpu
from motet_kernels.group_norm import group_norm
from motet_kernels.modulate import gated_add, modulated_norm

from .deferred_tensor import DeferredTensor, DeferredWork, materialized, other

log = logging.getLogger(__name__)
aten = torch.ops.aten

# Largest mean absolute difference of two passes, relative to the mean absolute output.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def fuse(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Fuse a model on a GPU in place if its output stays the same; return how many parts fused.

    run: a pass of the model, with the same input each time.
    """
    first = next(model.parameters())
    if not gpu.takes(first) or first.dtype not in _TOLERANCES:
        return 0
    replacements = list(_replacements(model))
    try:
        with torch.no_grad():
            expected = run()
            for replacement in replacements:
                replacement.replace()
            fused = materialized(run())
    except Exception as error:  # fusing is optional: on any failure the model is restored
        log.warning("%s is not fused: %s: %s", type(model).__name__, type(error).__name__, error)
        return _restore(replacements)
    if not _agrees(fused, expected):
        log.warning("%s is not fused: its output differs with fused kernels", type(model).__name__)
        return _restore(replacements)
    _restore([replacement for replacement in replacements if not replacement.uses])
    return sum(replacement.uses > 0 for replacement in replacements)


def _restore(replacements: Sequence[Replacement]) -> int:
    for replacement in replacements:
        replacement.restore()
    return 0


def _agrees(fused: Tensor, expected: Tensor) -> bool:
    wide = expected.float()
    return bool(
        (fused.float() - wide).abs().mean() <= _TOLERANCES[expected.dtype] * wide.abs().mean()
    )


# ------------------------------------------------------------------------------------ replacements
class Replacement:
    """Replace the forward of one module, reversibly. uses: number of fused kernel calls."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._forward = module, forward
        self._original = module.__dict__.get("forward")
        self.uses = 0

    def replace(self) -> None:
        self._module.forward = partial(self._forward, self, self._module.forward)

    def restore(self) -> None:
        self._module.__dict__.pop("forward", None)
        if self._original is not None:
            self._module.forward = self._original


def _replacements(model: nn.Module) -> Iterator[Replacement]:
    """Yield the norms, and the parts of the blocks in a model's chains."""
    for module in model.modules():
        if isinstance(module, nn.GroupNorm) and module.affine:
            yield Replacement(module, partial(_group_norm, module))
        elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
            yield Replacement(module, partial(_layer_norm, module))
    for chain in model.modules():
        for block in chain if isinstance(chain, nn.ModuleList) else ():
            for part in block.children():
                if not isinstance(part, (nn.LayerNorm, nn.GroupNorm, nn.ModuleList)):
                    yield Replacement(part, _gateable)


def _group_norm(
    module: nn.GroupNorm, replacement: Replacement, forward: Callable[..., Any], x: Tensor
) -> Tensor:
    x = materialized(x)
    if not _is_supported(x, 3) or x.dim() > 5:
        out: Tensor = forward(x)
        return out
    is_dense = x.is_contiguous() or (
        x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    )
    work = GroupNormed(replacement, x, module)
    return DeferredTensor(work, x) if is_dense else work.value


def _layer_norm(
    module: nn.LayerNorm, replacement: Replacement, forward: Callable[..., Any], x: Tensor
) -> Tensor:
    x = materialized(x)
    if not _is_supported(x, 3) or x.dim() != 3 or x.stride(2) != 1:
        out: Tensor = forward(x)
        return out
    work = LayerNormed(replacement, x, module)
    return DeferredTensor(work, x) if x.is_contiguous() else work.value


def _gateable(
    replacement: Replacement, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    result = forward(*args, **kwargs)
    if isinstance(result, tuple):
        return tuple(_to_gate(replacement, part) for part in result)
    return _to_gate(replacement, result)


def _to_gate(replacement: Replacement, result: Any) -> Any:
    if (
        type(result) is not Tensor
        or not _is_supported(result, 3)
        or result.dim() != 3
        or result.stride(2) != 1
    ):
        return result
    return DeferredTensor(Gateable(replacement, result), result)


def _is_supported(x: Tensor, min_dims: int) -> bool:
    return x.dim() >= min_dims and x.dtype in _TOLERANCES and gpu.takes(x)


# --------------------------------------------------------------------------------------------- work
@dataclass(eq=False)
class GroupNormed(DeferredWork):
    """Represent a group norm that SiLU may follow."""

    replacement: Replacement
    x: Tensor
    module: nn.GroupNorm

    def compute(self) -> Tensor:
        return self._compute(silu=False)

    def after(self, operation: Any, args: Sequence[Any]) -> Tensor | None:
        return self._compute(silu=True) if operation is aten.silu.default else None

    def _compute(self, *, silu: bool) -> Tensor:
        self.replacement.uses += 1
        norm = self.module
        return group_norm(self.x, norm.weight, norm.bias, norm.num_groups, norm.eps, silu=silu)


@dataclass(eq=False)
class LayerNormed(DeferredWork):
    """Represent a layer norm, maybe times a row per picture (`factor`), maybe plus another."""

    replacement: Replacement
    x: Tensor
    module: nn.LayerNorm
    factor: Tensor | None = None

    def compute(self) -> Tensor:
        return self._compute(None)

    def after(self, operation: Any, args: Sequence[Any]) -> Tensor | None:
        if (
            operation is aten.mul.Tensor
            and self.factor is None
            and _is_row(row := materialized(other(args, self)), self.x)
        ):
            return DeferredTensor(LayerNormed(self.replacement, self.x, self.module, row), self.x)
        if (
            operation is aten.add.Tensor
            and self.factor is not None
            and _is_row(row := materialized(other(args, self)), self.x)
        ):
            return self._compute(row)
        return None

    def _compute(self, shift: Tensor | None) -> Tensor:
        self.replacement.uses += 1
        norm = self.module
        return modulated_norm(self.x, norm.eps, self.factor, shift, norm.weight, norm.bias)


@dataclass(eq=False)
class Gateable(DeferredWork):
    """Represent a block part's result, maybe times a row per picture (`gate`), to be added."""

    replacement: Replacement
    x: Tensor
    gate: Tensor | None = None

    def compute(self) -> Tensor:
        return self.x if self.gate is None else self.gate * self.x

    def after(self, operation: Any, args: Sequence[Any]) -> Tensor | None:
        if (
            operation is aten.mul.Tensor
            and self.gate is None
            and _is_row(row := materialized(other(args, self)), self.x)
        ):
            return DeferredTensor(Gateable(self.replacement, self.x, row), self.x)
        if operation is aten.add.Tensor and self.gate is not None:
            residual = materialized(other(args, self))
            if (
                isinstance(residual, Tensor)
                and residual.shape == self.x.shape
                and residual.dtype == self.x.dtype
            ):
                self.replacement.uses += 1
                return gated_add(
                    residual if residual.stride(2) == 1 else residual.contiguous(),
                    self.gate,
                    self.x,
                )
        return None


def _is_row(part: Any, x: Tensor) -> bool:
    """Return True for a row of channels per picture of x `[B, S, C]`, or one row for all."""
    if not isinstance(part, Tensor) or part.dim() != 3 or part.dtype != x.dtype:
        return False
    return (
        part.shape[0] in (1, len(x)) and part.shape[1:] == (1, x.shape[2]) and part.stride(2) == 1
    )
