"""Group norm (Wu and He 2018), with SiLU or without: of the convolutions of diffusion models and their VAEs.

Shapes: N pictures, C channels in groups of C / groups, pixels of any number of dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import gpu
from .arguments import check_device
from .errors import KernelError

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def group_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, *, silu: bool = False) -> Tensor:
    """`(x - mean) / sqrt(variance + eps) · weight + bias` by picture and group of x `[N, C, ...]`, then SiLU if so.

    In x's type and order in memory, channels last or not; weight and bias of any floating type, dense. Raises
    `KernelError` on channels that do not come apart into groups, and on weights of another length, type or device.
    """
    _check(x, weight_C, bias_C, groups)
    if gpu.takes(x):
        from .gpu import group_norm as kernels

        return kernels.group_norm(x, weight_C, bias_C, groups, eps, silu)
    return group_norm_torch(x, weight_C, bias_C, groups, eps, silu=silu)


def group_norm_torch(
    x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int, eps: float, *, silu: bool = False
) -> Tensor:
    """The twin."""
    if not x.numel():
        return torch.empty_like(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.group_norm(x.to(wide), groups, weight_C.to(wide), bias_C.to(wide), eps)
    return (F.silu(out) if silu else out).to(x.dtype)


def _check(x: Tensor, weight_C: Tensor, bias_C: Tensor, groups: int) -> None:
    if x.dtype not in _TYPES or x.dim() < 3:
        raise KernelError(f"x: {x.dtype} {list(x.shape)} must be floating, of 3 dimensions or more: [N, C, pixels]")
    channels = x.shape[1]
    if groups < 1 or channels % groups or not channels:
        raise KernelError(f"groups: {groups} must be at least 1 and divide the {channels} channels of x")
    for name, part in (("weight_C", weight_C), ("bias_C", bias_C)):
        if part.dtype not in _TYPES or part.shape != (channels,) or not part.is_contiguous():
            raise KernelError(f"{name}: {part.dtype} {list(part.shape)} must be dense and floating, [{channels}]")
        check_device(name, part, "x", x)
