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


def guided(unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
    """Return `unconditional + scale · (conditional - unconditional)`, in their type.

    The predictions are dense and of one shape and type. Raises `KernelError` on tensors that are
    not dense, and on other shapes, types and devices.
    """
    _check({"unconditional": unconditional, "conditional": conditional})
    if gpu.takes(unconditional):
        from motet_kernels.gpu import guidance as kernels

        return kernels.guided(unconditional, conditional, scale)
    return guided_torch(unconditional, conditional, scale)


def guided_step(
    sample: Tensor,
    unconditional: Tensor,
    conditional: Tensor,
    scale: float,
    sample_factor: float,
    output_factor: float,
) -> Tensor:
    """Return `sample_factor · sample + output_factor · guided(…)`, in the sample's type.

    All tensors are dense and of one shape. Raises `KernelError` on tensors that are not, and on
    other types and devices.
    """
    _check({"sample": sample, "unconditional": unconditional, "conditional": conditional})
    if gpu.takes(sample):
        from motet_kernels.gpu import guidance as kernels

        return kernels.guided_step(
            sample, unconditional, conditional, scale, sample_factor, output_factor
        )
    return guided_step_torch(
        sample, unconditional, conditional, scale, sample_factor, output_factor
    )


def guided_torch(unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
    """Compute `guided` in torch: its twin."""
    wide = unconditional.to(torch.promote_types(unconditional.dtype, torch.float32))
    return (wide + scale * (conditional.to(wide.dtype) - wide)).to(unconditional.dtype)


def guided_step_torch(
    sample: Tensor,
    unconditional: Tensor,
    conditional: Tensor,
    scale: float,
    sample_factor: float,
    output_factor: float,
) -> Tensor:
    """Compute `guided_step` in torch: its twin."""
    wide = torch.promote_types(sample.dtype, torch.float32)
    prediction = guided_torch(unconditional.to(wide), conditional.to(wide), scale)
    return (sample_factor * sample.to(wide) + output_factor * prediction).to(sample.dtype)


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
