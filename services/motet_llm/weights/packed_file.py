"""Keep the packed matrices of one model in a file, and read them back without packing.

A file begins with the length of its description and the description's checksum and JSON. The
tensors follow from the next page on, each at a multiple of 64 bytes. They are read into memory of
the process's own, not mapped: a mapped file counts as free memory, by which the KV caches of other
models are sized, and its pages are dropped and read again when memory runs short.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.stored import put_together, take_apart
from motet_kernels.runtime.device import dtype_name
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.memory import huge_zeros
from motet_llm.models.fused_modules import FusedModules
from motet_shared.process.memory_turn import MemoryTurn

from .file_reading import PAGE, FileReading

SCHEMA = 2
_MOST_TEXT = 64 << 20  # bytes of a description
_ALIGN = 64  # bytes, of each tensor: kernels read vectors
_DIGEST = 64  # characters
# A checksum covers a block of each stride: enough to find a part that was never written.
_STRIDE, _BLOCK = 1 << 18, 1 << 12


class PackedFileError(Exception):
    """Report that a file does not hold the packed matrices that it should."""


@dataclass(frozen=True)
class PackedModel:
    """Hold a model's packed matrices by name.

    examined: the model's code needed no changes when it was examined (`support.examine`).
    fused: the modules that have fused versions; None: they were not compared.
    """

    matrices: Mapping[str, Linear]
    examined: bool
    fused: FusedModules | None = None

    @property
    def nbytes(self) -> int:
        """Return the memory of all matrices in bytes."""
        return sum(matrix.nbytes for matrix in self.matrices.values())


# ------------------------------------------------------------------------------------------ writing
def write_packed(path: Path, key: str, model: PackedModel) -> None:
    """Write the matrices of a model to a new file, readable by its owner only.

    key: what the file is expected to belong to. Raises OSError if it cannot be written, and
    KernelError for a matrix in the layout of a GPU.
    """
    fields: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, matrix in model.matrices.items():
        fields[name], parts = take_apart(matrix)
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in parts.items()}
    places: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        places[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "offset": end,
            "check": _checksum(tensor),
        }
        end += _round_up(tensor.nbytes, _ALIGN)
    about = {
        "schema": SCHEMA,
        "key": key,
        "examined": model.examined,
        "fused": None if model.fused is None else asdict(model.fused),
        "matrices": fields,
        "tensors": places,
        "bytes": _round_up(end, PAGE),
    }
    text = json.dumps(about).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write((_DIGEST + len(text)).to_bytes(8, "little") + _digest(text) + text)
        _write_tensors(file, tensors)


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    file.write(bytes(-file.tell() % PAGE))
    for tensor in tensors.values():
        file.write(_bytes_of(tensor))
        file.write(bytes(-file.tell() % _ALIGN))
    file.write(bytes(-file.tell() % PAGE))


# ------------------------------------------------------------------------------------------ reading
class PackedReading:
    """Read a file of `write_packed`: its description at once, the tensors in the background.

    turn: waited for before memory is taken. Raises PackedFileError if the file is damaged, of
    another version, belongs to another `key` or can be changed by others, and OSError if it cannot
    be read.
    """

    def __init__(self, path: Path, key: str, turn: MemoryTurn | None = None):
        self._path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _check_owner(descriptor)
            self._about, start = _describe(descriptor, key)
            self.examined = bool(self._about["examined"])
            size = _count(self._about["bytes"])
            if os.fstat(descriptor).st_size < start + size:
                raise PackedFileError(f"{path}: its end is missing")
            memory = huge_zeros((size,), torch.uint8)
            self._data: Any = memory.numpy()
            self._reading = FileReading(descriptor, start, memory, turn)
        except (KeyError, TypeError, ValueError) as error:
            os.close(descriptor)
            raise PackedFileError(f"{path}: {error!r}") from error
        except BaseException:
            os.close(descriptor)
            raise

    def layout(self) -> PackedModel:
        """Return the matrices, whose numbers are there once `wait` has returned.

        Waits itself where a layout depends on numbers. Raises as the constructor does.
        """
        if any(fields["kind"] != "panels" for fields in self._about["matrices"].values()):
            self._reading.wait()
        try:
            grouped: dict[str, dict[str, Tensor]] = {name: {} for name in self._about["matrices"]}
            for name, place in self._about["tensors"].items():
                matrix, _, part = name.rpartition("/")
                grouped[matrix][part] = self._tensor(name, place)
            matrices = {
                name: put_together(fields, grouped[name])
                for name, fields in self._about["matrices"].items()
            }
            fused = self._about["fused"]
            modules = None if fused is None else FusedModules(**fused)
        except (KernelError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedFileError(f"{self._path}: {error!r}") from error
        return PackedModel(matrices, self.examined, modules)

    def wait(self) -> None:
        """Wait for all numbers and compare their checksums; raise as the constructor does."""
        self._reading.wait()
        try:
            for name, place in self._about["tensors"].items():
                tensor = self._tensor(name, place)
                if tensor.numel() and _checksum(tensor) != place["check"]:
                    raise PackedFileError(f"{self._path}: {name} is damaged")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PackedFileError(f"{self._path}: {error!r}") from error

    def _tensor(self, name: str, place: Mapping[str, Any]) -> Tensor:
        dtype: torch.dtype = getattr(torch, place["dtype"])
        shape = tuple(_count(size) for size in place["shape"])
        if not (count := math.prod(shape)):
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(
            self._data, dtype=dtype, count=count, offset=_count(place["offset"])
        ).view(shape)


def _check_owner(descriptor: int) -> None:
    state = os.fstat(descriptor)
    if state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise PackedFileError("it must be of this user and of mode 0600")


def _describe(descriptor: int, key: str) -> tuple[dict[str, Any], int]:
    """Return the description, and the offset of the tensors in bytes."""
    size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not _DIGEST < size <= _MOST_TEXT:
        raise PackedFileError("it has no description")
    header = os.pread(descriptor, size, 8)
    digest, text = header[:_DIGEST], header[_DIGEST:]
    if len(header) < size or digest != _digest(text):
        raise PackedFileError("its description is damaged")
    about: dict[str, Any] = json.loads(text)
    if about["schema"] != SCHEMA or about["key"] != key:
        raise PackedFileError("it belongs to another version or checkpoint")
    return about, _round_up(8 + size, PAGE)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _checksum(tensor: Tensor) -> int:
    """Return the checksum of a block of each stride, and of the last bytes."""
    data = _bytes_of(tensor)
    found = zlib.crc32(data[-_BLOCK:])
    for start in range(0, len(data), _STRIDE):
        found = zlib.crc32(data[start : start + _BLOCK], found)
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(numbers)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()
