"""Keep the packed matrices of one model in a file, and read them back without packing.

The file is safetensors; its metadata say what the tensors belong to. It is read into memory of the
process's own, not mapped: a mapped file counts as free memory, by which the KV caches of other
models are sized, and its pages are dropped and read again when memory runs short.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.stored import put_together, take_apart
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.memory import huge_zeros

SCHEMA = 1
_FIELD = "motet_packed"
# A checksum covers a block of each stride: enough to find a part that was never written.
_STRIDE, _BLOCK = 1 << 18, 1 << 12


class PackedFileError(Exception):
    """Report that a file does not hold the packed matrices that it should."""


@dataclass(frozen=True)
class PackedModel:
    """Hold a model's packed matrices by name.

    examined: the model's code needed no changes when it was examined (`support.examine`).
    """

    matrices: Mapping[str, Linear]
    examined: bool

    @property
    def nbytes(self) -> int:
        """Return the memory of all matrices in bytes."""
        return sum(matrix.nbytes for matrix in self.matrices.values())


def write_packed(path: Path, key: str, model: PackedModel) -> None:
    """Write the matrices of a model to a new file, readable by its owner only.

    key: what the file is expected to belong to. Raises OSError or SafetensorError if it cannot be
    written, and KernelError for a matrix in the layout of a GPU.
    """
    fields: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, matrix in model.matrices.items():
        fields[name], parts = take_apart(matrix)
        tensors |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
    about = {
        "schema": SCHEMA,
        "key": key,
        "examined": model.examined,
        "matrices": fields,
        "checks": {name: _checksum(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(about)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    save_file(tensors, path, {_FIELD: text, "sha256": _digest(text)})
    os.chmod(path, 0o600)


def read_packed(path: Path, key: str) -> PackedModel:
    """Return the matrices in a file.

    Raises PackedFileError if it is damaged, of another version or belongs to another `key`, and
    OSError if it cannot be read.
    """
    try:
        _read_ahead(path)
        with safe_open(path, framework="pt") as file:
            about = _about(file.metadata() or {}, key)
            tensors = {name: _read(file, name, about["checks"]) for name in file.keys()}  # noqa: SIM118 - no mapping
        grouped: dict[str, dict[str, Tensor]] = {name: {} for name in about["matrices"]}
        for name, tensor in tensors.items():
            matrix, _, part = name.rpartition("/")
            grouped[matrix][part] = tensor
        matrices = {
            name: put_together(fields, grouped[name]) for name, fields in about["matrices"].items()
        }
        return PackedModel(matrices, bool(about["examined"]))
    except (SafetensorError, KernelError, KeyError, TypeError, ValueError) as error:
        raise PackedFileError(f"{path}: {error}") from error


def _read_ahead(path: Path) -> None:
    """Check whose file it is, and have the system begin to read all of it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        state = os.fstat(descriptor)
        if state.st_uid != os.geteuid() or state.st_mode & 0o077:
            raise PackedFileError(f"{path}: must be of this user and of mode 0600")
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)


def _about(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    text = metadata[_FIELD]
    if metadata["sha256"] != _digest(text):
        raise PackedFileError("its description is damaged")
    about: dict[str, Any] = json.loads(text)
    if about["schema"] != SCHEMA or about["key"] != key:
        raise PackedFileError("it belongs to another version or checkpoint")
    return about


def _read(file: Any, name: str, checks: Mapping[str, int]) -> Tensor:
    mapped = file.get_tensor(name)
    tensor = huge_zeros(tuple(mapped.shape), mapped.dtype).copy_(mapped)
    if _checksum(tensor) != checks[name]:
        raise PackedFileError(f"{name} is damaged")
    return tensor


def _checksum(tensor: Tensor) -> int:
    """Return the checksum of a block of each stride, and of the last bytes."""
    numbers: Any = tensor.flatten().view(torch.uint8).numpy()
    data = memoryview(numbers)
    found = zlib.crc32(data[-_BLOCK:])
    for start in range(0, len(data), _STRIDE):
        found = zlib.crc32(data[start : start + _BLOCK], found)
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
