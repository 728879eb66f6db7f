"""Compute adaptive layer norm and gated addition of diffusion transformers (Peebles and Xie 2023).

They condition the transformer on its time step.

Shapes: B pictures, S tokens, C channels; factors, shifts and gates have one row per picture,
`[B, 1, C]` (or one for all, `[1, 1, C]`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import check_device, check_floats
from motet_kernels.runtime.errors import KernelError


def modulated_norm(
    x_BSC: Tensor,
    eps: float,
    factor_B1C: Tensor | None = None,
    shift_B1C: Tensor | None = None,
    weight_C: Tensor | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Return `((x - mean) / sqrt(variance + eps) · weight + bias) · factor + shift` by token.

    The result is of x's type. The factor is what models call 1 + scale. Arguments that are None are
    left out; all others are of any floating type with dense channels. Raises `KernelError` on other
    shapes, types and devices.
    """
    _check(x_BSC, {"factor_B1C": factor_B1C, "shift_B1C": shift_B1C})
    for name, part in (("weight_C", weight_C), ("bias_C", bias_C)):
        if part is not None:
            _check_part(name, part, x_BSC, 1)
    if gpu.takes(x_BSC):
        from motet_kernels.gpu import modulate as kernels

        return kernels.modulated_norm(x_BSC, eps, factor_B1C, shift_B1C, weight_C, bias_C)
    return modulated_norm_torch(x_BSC, eps, factor_B1C, shift_B1C, weight_C, bias_C)


def gated_add(residual_BSC: Tensor, gate_B1C: Tensor, x_BSC: Tensor) -> Tensor:
    """Return `residual + gate · x`, in the residual's type.

    Raises `KernelError` on other shapes, types and devices.
    """
    _check(residual_BSC, {"gate_B1C": gate_B1C})
    check_floats("x_BSC", x_BSC, 3)
    check_device("x_BSC", x_BSC, "residual_BSC", residual_BSC)
    if x_BSC.shape != residual_BSC.shape:
        raise KernelError(
            f"x_BSC: {list(x_BSC.shape)} must be {list(residual_BSC.shape)}, as residual_BSC"
        )
    if gpu.takes(x_BSC):
        from motet_kernels.gpu import modulate as kernels

        return kernels.gated_add(residual_BSC, gate_B1C, x_BSC)
    return gated_add_torch(residual_BSC, gate_B1C, x_BSC)


def modulated_norm_torch(
    x_BSC: Tensor,
    eps: float,
    factor_B1C: Tensor | None = None,
    shift_B1C: Tensor | None = None,
    weight_C: Tensor | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Compute `modulated_norm` in torch: its twin."""
    weight, bias = (None if part is None else _wide(part) for part in (weight_C, bias_C))
    out = F.layer_norm(_wide(x_BSC), x_BSC.shape[-1:], weight, bias, eps)
    out = out if factor_B1C is None else out * _wide(factor_B1C)
    return (out if shift_B1C is None else out + _wide(shift_B1C)).to(x_BSC.dtype)


def gated_add_torch(residual_BSC: Tensor, gate_B1C: Tensor, x_BSC: Tensor) -> Tensor:
    """Compute `gated_add` in torch: its twin."""
    residual, gate, x = map(_wide, (residual_BSC, gate_B1C, x_BSC))
    return (residual + gate * x).to(residual_BSC.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(x_BSC: Tensor, rows: dict[str, Tensor | None]) -> None:
    check_floats("x_BSC", x_BSC, 3)
    pictures, _, channels = x_BSC.shape
    for name, part in rows.items():
        if part is None:
            continue
        _check_part(name, part, x_BSC, 3)
        if part.shape[0] not in (1, pictures) or part.shape[1] != 1:
            raise KernelError(
                f"{name}: {list(part.shape)} must be [{pictures}, 1, {channels}] or [1, 1, {channels}]"
            )


def _check_part(name: str, part: Tensor, x_BSC: Tensor, ndim: int) -> None:
    check_floats(name, part, ndim)
    check_device(name, part, "x_BSC", x_BSC)
    if part.shape[-1] != x_BSC.shape[-1]:
        raise KernelError(
            f"{name}: {part.shape[-1]} channels, must be {x_BSC.shape[-1]}, as x_BSC has"
        )
