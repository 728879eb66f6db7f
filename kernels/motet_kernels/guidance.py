"""Apply classifier-free guidance (Ho and Salimans 2022) and the scheduler's step after it.

A deterministic scheduler step without history (Euler, DDIM, flow matching) is a linear combination
of the noisy picture and the denoiser's prediction, with coefficients that the schedule knows in
advance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.runtime.arguments import GPU_FLOATS, check_device
from motet_kernels.runtime.errors import KernelError


def guided(without: Tensor, with_text: Tensor, scale: float) -> Tensor:
    """Return `without + scale · (with_text - without)` of dense predictions of one shape and type.

    The result is of that type. Raises `KernelError` on tensors that are not dense, and on other
    shapes, types and devices.
    """
    _check({"without": without, "with_text": with_text})
    if gpu.takes(without):
        from motet_kernels.gpu import guidance as kernels

        return kernels.guided(without, with_text, scale)
    return guided_torch(without, with_text, scale)


def guided_step(
    sample: Tensor, without: Tensor, with_text: Tensor, scale: float, keep: float, change: float
) -> Tensor:
    """Return `keep · sample + change · guided(…)`, in the sample's type.

    All tensors are dense and of one shape. Raises `KernelError` on tensors that are not, and on
    other types and devices.
    """
    _check({"sample": sample, "without": without, "with_text": with_text})
    if gpu.takes(sample):
        from motet_kernels.gpu import guidance as kernels

        return kernels.guided_step(sample, without, with_text, scale, keep, change)
    return guided_step_torch(sample, without, with_text, scale, keep, change)


def guided_torch(without: Tensor, with_text: Tensor, scale: float) -> Tensor:
    """Compute `guided` in torch: its twin."""
    wide = without.to(torch.promote_types(without.dtype, torch.float32))
    return (wide + scale * (with_text.to(wide.dtype) - wide)).to(without.dtype)


def guided_step_torch(
    sample: Tensor, without: Tensor, with_text: Tensor, scale: float, keep: float, change: float
) -> Tensor:
    """Compute `guided_step` in torch: its twin."""
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
