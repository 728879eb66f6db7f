"""Check tensors before their addresses are passed to native code.

All checks raise `KernelError`; the message names the argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motet_kernels import gpu

from .errors import KernelError

FLOATS = (torch.float32, torch.bfloat16)
GPU_FLOATS = (*FLOATS, torch.float16)


def check_floats(name: str, tensor: Tensor, ndim: int) -> None:
    """Check that `tensor` has `ndim` dimensions of float32 or bfloat16, the last one dense.

    On a GPU it may also be float16.
    """
    if tensor.dtype not in (GPU_FLOATS if gpu.takes(tensor) else FLOATS):
        raise KernelError(
            f"{name}: {tensor.dtype} must be float32 or bfloat16, on a GPU also float16"
        )
    _check_layout(name, tensor, ndim)


def check_pages(name: str, tensor: Tensor) -> None:
    """Check that `tensor` is a cache of keys or values: as `check_floats`, or of 8 bits."""
    if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
        _check_layout(name, tensor, 4)
    else:
        check_floats(name, tensor, 4)


def check_integers(name: str, tensor: Tensor, ndim: int, dtype: torch.dtype) -> None:
    """Check that `tensor` has `ndim` dimensions of `dtype`, the last one dense."""
    if tensor.dtype != dtype:
        raise KernelError(f"{name}: {tensor.dtype} must be {dtype}")
    _check_layout(name, tensor, ndim)


def _check_layout(name: str, tensor: Tensor, ndim: int) -> None:
    if tensor.dim() != ndim:
        raise KernelError(
            f"{name}: {tensor.dim()} dimensions, shape {list(tensor.shape)}, must be {ndim}"
        )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelError(
            f"{name}: stride {tensor.stride(-1)} of the last dimension must be 1; call .contiguous()"
        )


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check that `tensor` is on the same device as `like`."""
    if tensor.device != like.device:
        raise KernelError(
            f"{name}: on {tensor.device} must be on {like.device}, where {like_name} is"
        )


def is_cpu(tensor: Tensor) -> bool:
    """Return True for CPU tensors, which native kernels take.

    Other tensors go to Triton's kernels or the torch twins.
    """
    return tensor.is_cpu
