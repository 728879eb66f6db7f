"""Classifier-free guidance (Ho and Salimans 2022) and the scheduler's step after it.

A step without noise and memory (Euler's, DDIM's, flow matching's) is a sum of the noisy picture and of what the
denoiser says, each times a number that the schedule knows before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import gpu
from .arguments import GPU_FLOATS, check_device
from .errors import KernelError


def guided(without: Tensor, with_text: Tensor, scale: float) -> Tensor:
    """`without + scale · (with_text - without)` of dense predictions of one shape and type, in that type."""
    _check({"without": without, "with_text": with_text})
    if gpu.takes(without):
        from .gpu import guidance as kernels

        return kernels.guided(without, with_text, scale)
    return guided_torch(without, with_text, scale)


def guided_step(sample: Tensor, without: Tensor, with_text: Tensor, scale: float, keep: float, change: float) -> Tensor:
    """`keep · sample + change · guided(…)` of dense tensors of one shape, in the sample's type.

    Raises `KernelError` on tensors that are not dense, and on other shapes, types and devices.
    """
    _check({"sample": sample, "without": without, "with_text": with_text})
    if gpu.takes(sample):
        from .gpu import guidance as kernels

        return kernels.guided_step(sample, without, with_text, scale, keep, change)
    return guided_step_torch(sample, without, with_text, scale, keep, change)


def guided_torch(without: Tensor, with_text: Tensor, scale: float) -> Tensor:
    """The twin."""
    wide = without.to(torch.promote_types(without.dtype, torch.float32))
    return (wide + scale * (with_text.to(wide.dtype) - wide)).to(without.dtype)


def guided_step_torch(
    sample: Tensor, without: Tensor, with_text: Tensor, scale: float, keep: float, change: float
) -> Tensor:
    """The twin."""
    wide = torch.promote_types(sample.dtype, torch.float32)
    said = guided_torch(without.to(wide), with_text.to(wide), scale)
    return (keep * sample.to(wide) + change * said).to(sample.dtype)


def _check(tensors: dict[str, Tensor]) -> None:
    (first_name, first), *_ = tensors.items()
    for name, tensor in tensors.items():
        if tensor.dtype not in GPU_FLOATS:
            raise KernelError(f"{name}: {tensor.dtype} must be float32, bfloat16 or float16")
        if tensor.shape != first.shape or not tensor.is_contiguous():
            raise KernelError(
                f"{name}: {list(tensor.shape)} of strides {list(tensor.stride())} must be dense {list(first.shape)}, "
                f"as {first_name}"
            )
        check_device(name, tensor, first_name, first)
