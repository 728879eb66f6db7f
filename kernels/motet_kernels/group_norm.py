"""Compute group norm (Wu and He 2018), optionally with SiLU, for diffusion models and their VAEs.

Shapes: N pictures, C channels in groups of C / groups, pixels of any number of dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import check_device
from motet_kernels.runtime.errors import KernelError

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def group_norm(
    x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, *, silu: bool = False
) -> Tensor:
    """Return `(x - mean) / sqrt(variance + eps) · weight + bias` by picture and group.

    x is `[N, C, ...]`; `silu` applies SiLU to the result. The result has x's type and memory
    format, channels last or not; weight and bias are dense, of any floating type. Raises
    `KernelError` on channels that are not a multiple of the groups, and on weights of another
    length, type or device.
    """
    _check(x, weight_C, bias_C, groups)
    if gpu.takes(x):
        from motet_kernels.gpu import group_norm as kernels

        return kernels.group_norm(x, weight_C, bias_C, groups, eps, silu)
    return group_norm_torch(x, weight_C, bias_C, groups, eps, silu=silu)


def group_norm_torch(
    x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, *, silu: bool = False
) -> Tensor:
    """Compute `group_norm` in torch: its twin."""
    if not x.numel():
        return torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.group_norm(x.to(wide), groups, weight_C.to(wide), bias_C.to(wide), eps)
    return (F.silu(out) if silu else out).to(x.dtype)


def _check(x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int) -> None:
    if x.dtype not in _TYPES or x.dim() < 3:
        raise KernelError(
            f"x: {x.dtype} {list(x.shape)} must be floating, of 3 dimensions or more: [N, C, pixels]"
        )
    channels = x.shape[1]
    if groups < 1 or channels % groups or not channels:
        raise KernelError(
            f"groups: {groups} must be at least 1 and divide the {channels} channels of x"
        )
    for name, part in (("weight_C", weight_C), ("bias_C", bias_C)):
        if part.dtype not in _TYPES or part.shape != (channels,) or not part.is_contiguous():
            raise KernelError(
                f"{name}: {part.dtype} {list(part.shape)} must be dense and floating, [{channels}]"
            )
        check_device(name, part, "x", x)
