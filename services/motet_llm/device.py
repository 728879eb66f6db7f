"""Where the engine computes, and how numbers get there and back without waiting for what a GPU still has to do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu, native
from motet_kernels.spans import upload
from motet_shared.errors import ConfigError

_ALIGNED = 2  # numbers of 64 bits that make the 16 bytes at which Triton likes a tensor to begin


def find_device(wanted: str) -> torch.device:
    """ "cpu", "cuda" (the first GPU) or "cuda:1". Raises ConfigError for what is no such word or is not there."""
    kind, _, number = wanted.partition(":")
    if wanted == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (number and not number.isdecimal()) or wanted.endswith(":"):
        raise ConfigError(f"device={wanted!r}: give cpu, cuda or, of several GPUs, cuda:1")
    count, index = torch.cuda.device_count(), int(number or 0)
    if index >= count:
        built = "" if torch.backends.cuda.is_built() else " (and this torch is built without CUDA: install one with it)"
        raise ConfigError(f"device={wanted!r}: torch sees {count} GPUs{built}; give cpu, or make the GPU visible")
    return torch.device("cuda", index)


def describe(device: torch.device) -> dict[str, str]:
    """Who computes there, and why if it is not the fastest."""
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
    """Bytes of a GPU that nobody has."""
    free, _ = torch.cuda.mem_get_info(device)
    return free


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int64 arrays on `device`, all of them in one copy; those of the CPU stay where they are."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    padded = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    packed = np.zeros(sum(padded), dtype=np.int64)
    for array, part in zip(arrays, np.split(packed, np.cumsum(padded)[:-1]), strict=True):
        part[: array.size] = array.ravel()
    parts = upload(torch.from_numpy(packed), device).split(padded)
    return [part[: array.size].view(array.shape) for array, part in zip(arrays, parts, strict=True)]


class Download:
    """A tensor on its way to the CPU, right behind what computes it."""

    def __init__(self, tensor: Tensor):
        self._here = tensor if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> Tensor:
        """The tensor, as soon as it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here
