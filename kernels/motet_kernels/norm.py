"""Compute root mean square norm (Zhang and Sennrich 2019) and layer norm (Ba et al. 2016).

The bits of a row depend on that row alone.

Shapes: M rows, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import FLOATS, check_device, check_floats, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_RMS = Kernel("motet_rms_norm", "piippiiff")
_LAYER = Kernel("motet_layer_norm", "piipppiif")


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `x / sqrt(mean(x²) + eps) · (offset + weight)` over the last dimension of x.

    x is `[..., C]`, the result of the same shape and type. Weights are dense float32. Native for
    float32 and bfloat16 on the CPU. Raises `KernelError` on others.
    """
    _check_rms(x, weight_C)
    if gpu.takes(x):
        from motet_kernels.gpu import norm as kernels

        return kernels.rms_norm(_rows(x), weight_C, eps, offset).view(x.shape)
    native = _RMS.native() if is_cpu(x) and x.dtype in FLOATS else None
    if native is None:
        return rms_norm_torch(x, weight_C, eps, offset)
    x_MC, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
    native(
        x_MC.data_ptr(),
        x.dtype == torch.bfloat16,
        x_MC.stride(0),
        weight_C.data_ptr(),
        out.data_ptr(),
        *x_MC.shape,
        eps,
        offset,
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight_C: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `x + residual`, rounded to their type, and its `rms_norm`.

    All four are `[..., C]` of one shape and type. Raises `KernelError` on a residual that differs
    from x in these.
    """
    _check_rms(x, weight_C)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise KernelError(
            f"residual: {residual.dtype} {list(residual.shape)} must be {x.dtype} {list(x.shape)}, as x"
        )
    check_device("residual", residual, "x", x)
    if not gpu.takes(x):
        total = x + residual
        return total, rms_norm(total, weight_C, eps, offset)
    from motet_kernels.gpu import norm as kernels

    total, normed = kernels.add_rms_norm(_rows(x), _rows(residual), weight_C, eps, offset)
    return total.view(x.shape), normed.view(x.shape)


def layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) · weight + bias` over the last dimension of x.

    x is `[..., C]`, the result of the same shape and type. Weights and biases are dense float32.
    Native for float32 and bfloat16 on the CPU. Raises `KernelError` on others.
    """
    for name, part in (("weight_C", weight_C), ("bias_C", bias_C)):
        if part.dtype != torch.float32 or part.shape != x.shape[-1:] or not part.is_contiguous():
            raise KernelError(
                f"{name}: {part.dtype} {list(part.shape)} must be dense float32 [{x.shape[-1]}]"
            )
        check_device(name, part, "x", x)
    if gpu.takes(x):
        from motet_kernels.gpu import norm as kernels

        return kernels.layer_norm(_rows(x), weight_C, bias_C, eps).view(x.shape)
    native = _LAYER.native() if is_cpu(x) and x.dtype in FLOATS else None
    if native is None:
        return layer_norm_torch(x, weight_C, bias_C, eps)
    x_MC, out = _rows(x), torch.empty(x.shape, dtype=x.dtype)
    weights = weight_C.data_ptr(), bias_C.data_ptr()
    rows = x_MC.data_ptr(), x.dtype == torch.bfloat16, x_MC.stride(0)
    native(*rows, *weights, out.data_ptr(), *x_MC.shape, eps)
    return out


def layer_norm_torch(x: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    """Compute `layer_norm` in torch: its twin."""
    wide = x.to(weight_C.dtype)
    return F.layer_norm(wide, wide.shape[-1:], weight_C, bias_C, eps).to(x.dtype)


def _check_rms(x: Tensor, weight_C: Tensor) -> None:
    if (
        weight_C.dtype != torch.float32
        or weight_C.shape != x.shape[-1:]
        or not weight_C.is_contiguous()
    ):
        raise KernelError(
            f"weight_C: {weight_C.dtype} {list(weight_C.shape)} must be dense float32 [{x.shape[-1]}]"
        )
    check_device("weight_C", weight_C, "x", x)


def _rows(x: Tensor) -> Tensor:
    """Return x as rows `[M, C]` with contiguous channels."""
    x_MC = x.reshape(-1, x.shape[-1])
    if x_MC.stride(1) != 1 and x_MC.shape[1] > 1:
        x_MC = x_MC.contiguous()
    check_floats("x", x_MC, 2)
    return x_MC


def rms_norm_torch(x: Tensor, weight_C: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute `rms_norm` in torch: its twin."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (offset + weight_C)).to(
        x.dtype
    )
