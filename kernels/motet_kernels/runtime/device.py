"""Choose the device and types that a service computes with, and copy between host and GPU.

Copies do not wait for pending GPU work. Invalid settings raise `refusal`, which is each service's
own error class.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.spans import upload

from . import native
from .errors import KernelError

LIMIT = "MOTET_GPU_MEMORY"  # bytes of a GPU that this process may allocate; unset: all
_used: list[torch.device] = []  # GPUs that this process was given, the latest last
NARROW = (torch.bfloat16, torch.float16)
_ALIGNED = 2  # int64 elements in 16 bytes, the alignment that Triton specializes on


def find_device(wanted: str, refusal: type[Exception] = KernelError) -> torch.device:
    """Return the device named "cpu", "cuda" (the first GPU) or "cuda:1".

    Raises `refusal` for another name, and for a GPU that torch does not see.
    """
    kind, _, number = wanted.partition(":")
    if wanted == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (number and not number.isdecimal()) or wanted.endswith(":"):
        raise refusal(f"device={wanted!r}: give cpu, cuda or, of several GPUs, cuda:1")
    count, index = torch.cuda.device_count(), int(number or 0)
    if index >= count:
        built = (
            ""
            if torch.backends.cuda.is_built()
            else " (and this torch is built without CUDA: install one with it)"
        )
        raise refusal(
            f"device={wanted!r}: torch sees {count} GPUs{built}; give cpu, or make the GPU visible"
        )
    device = torch.device("cuda", index)
    _limit_memory(device, refusal)
    _used.append(device)
    return device


def _limit_memory(device: torch.device, refusal: type[Exception]) -> None:
    """Have torch's allocator refuse more than MOTET_GPU_MEMORY bytes of a GPU that is shared."""
    given = os.environ.get(LIMIT, "")
    if not given:
        return
    total = torch.cuda.mem_get_info(device)[1]
    if not given.isdecimal() or not int(given) > 0:
        raise refusal(f"{LIMIT}={given!r}: give a number of bytes, at least 1")
    torch.cuda.set_per_process_memory_fraction(min(1.0, int(given) / total), device)


def readings() -> dict[str, float]:
    """Return what a heartbeat says of where the process computes.

    `gpu` is a number that processes on one GPU have in common; `kernels_on_torch` as
    `native.fallback` has it.
    """
    if not _used:
        return native.fallback()
    return {"gpu": _identity(_used[-1]), **native.fallback()}


@cache
def _identity(device: torch.device) -> float:
    """Return a number of a GPU, the beginning of its UUID; its index where torch knows no UUID."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", "")).replace("-", "")
    return float(int(uuid[:12], 16)) if uuid else float(device.index or 0)


def find_dtype(
    wanted: str,
    own: torch.dtype | None,
    device: torch.device,
    refusal: type[Exception] = KernelError,
) -> torch.dtype:
    """Return the type of activations: the wanted one, or the one that "auto" selects.

    "auto" is float32; on a GPU it is `own`, the checkpoint's type, if that has 16 bits. Raises
    `refusal` for float16 on a CPU, where it is slow.
    """
    check_float16("dtype", wanted, device, refusal)
    if wanted != "auto":
        found: torch.dtype = getattr(torch, wanted)
        return found
    return own if gpu.is_gpu(device) and own in NARROW else torch.float32


def check_float16(
    field: str, wanted: str, device: torch.device, refusal: type[Exception] = KernelError
) -> None:
    """Raise `refusal` for a setting of float16 on a CPU."""
    if wanted == "float16" and not gpu.is_gpu(device):
        raise refusal(
            f"{field}='float16': CPUs compute it slowly; give bfloat16 or float32, or device=cuda"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16: also the name of the matrix format."""
    return str(dtype).removeprefix("torch.")


def describe(device: torch.device) -> dict[str, str]:
    """Return the device, the kernels that run on it, and why if they are not the fastest."""
    if gpu.is_gpu(device):
        status = gpu.status()
        kernels = "torch" if status["triton"] == "off" else "triton"
    else:
        status = native.status()
        kernels = status["isa"]
    return {"device": str(device), "kernels": kernels} | (
        {"kernels_reason": status["reason"]} if status["reason"] else {}
    )


def free_memory(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes."""
    free, _ = torch.cuda.mem_get_info(device)
    return free


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return int64 arrays as tensors on `device`, in a single copy.

    On the CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    padded = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    packed = np.zeros(sum(padded), dtype=np.int64)
    for array, part in zip(arrays, np.split(packed, np.cumsum(padded)[:-1]), strict=True):
        part[: array.size] = array.ravel()
    parts = upload(torch.from_numpy(packed), device).split(padded)
    return [part[: array.size].view(array.shape) for array, part in zip(arrays, parts, strict=True)]


class Download:
    """Copy a tensor to the CPU asynchronously, ordered after the computation that produces it."""

    def __init__(self, tensor: Tensor):
        self._here = tensor if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> Tensor:
        """Return the tensor once its copy is complete."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here
