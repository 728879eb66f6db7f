"""Parse the header of a GGUF file: metadata, and where each tensor lies.

The format is specified in ggml's `docs/gguf.md`. Nothing here trusts the file: each length is
compared with what is left of it before it is used.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from motet_shared.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # where the file does not state one
_MOST_DIMENSIONS = 4
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor of a file: its type by ggml's name, shape in torch's order, and bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int


@dataclass(slots=True)
class Header:
    """Metadata by key, and the tensors by name, of a file and its further parts."""

    path: Path
    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorPlace] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the architecture."""
        return str(self.fields["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's own metadata, such as `attention.head_count`."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return a value as `get` does. Raises ConfigError if the file lacks it."""
        value = self.get(key)
        if value is None:
            raise ConfigError(
                f"{self.path.name}: {self.architecture}.{key} is missing; convert the model again"
            )
        return value


def parts_of(path: Path) -> list[Path]:
    """Return the parts of a split model in order, given any of them; `[path]` for a whole one.

    Raises ConfigError for a part that is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
    parts = [path.with_name(name) for name in names]
    if absent := [part.name for part in parts if not part.is_file()]:
        raise ConfigError(f"{path.parent}: {', '.join(absent[:8])} missing; copy all {count} parts")
    return parts


def read_header(path: Path) -> Header:
    """Return the header of a file; of a split one, that of the first part with all tensors.

    Raises ConfigError for a file that is no GGUF, is cut off, or states what cannot be.
    """
    header = Header(path)
    for part in parts_of(path):
        try:
            with part.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with data:
                _Parser(data, part).read_into(header)
        except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
            raise ConfigError(f"{part} cannot be read: {error}; copy it again") from error
    if not isinstance(header.fields.get("general.architecture"), str):
        raise ConfigError(f"{path} has no general.architecture; convert the model again")
    return header


class _Parser:
    """Read one file from its beginning. Raises ValueError where it contradicts itself."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data, self._path, self._at = data, path, 0

    def read_into(self, header: Header) -> None:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin as GGUF")
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"version {version}, not {' or '.join(map(str, _VERSIONS))}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        fields = {}
        for _ in range(self._count(num_fields, 13)):
            key = self._string()
            fields[key] = self._value(self._number("I"))
        entries = [self._entry() for _ in range(self._count(num_tensors, 24))]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment={alignment!r}")
        base = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in entries:
            nbytes = self._bytes_of(name, kind, shape)
            if base + offset + nbytes > len(self._data):
                raise ValueError(f"{name} ends behind the file")
            if name in header.tensors:
                raise ValueError(f"{name} is there twice")
            header.tensors[name] = TensorPlace(
                name, kind.name, shape, self._path, base + offset, nbytes
            )
        header.fields = {**fields, **header.fields}

    def _entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        kind = GGMLQuantizationType(self._number("I"))
        return name, kind, tuple(reversed(sizes)), self._number("Q")

    @staticmethod
    def _bytes_of(name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
        count, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % count:
            raise ValueError(f"{name} has rows of {shape[-1]} numbers, in blocks of {count}")
        return prod(shape) // count * size

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value = self._scalars(kind, 1)[0]
            # The shortest number of the same float32: 1e-6, not 9.99999997e-07.
            return float(str(np.float32(value))) if kind == _FLOAT32 else value
        inner, count = self._number("I"), self._number("Q")
        if inner == _STRING:
            return [self._string() for _ in range(self._count(count, 8))]
        return list(self._scalars(inner, count))

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind}")
        code = _SCALARS[kind]
        size = struct.calcsize(f"<{code}")
        return struct.unpack(f"<{self._count(count, size)}{code}", self._take(count * size))

    def _number(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return value

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _count(self, count: int, least: int) -> int:
        """Return `count` items of at least `least` bytes. Raises ValueError if they do not fit."""
        if count * least > len(self._data) - self._at:
            raise ValueError(f"{count} items in {len(self._data) - self._at} bytes")
        return count

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError("it is cut off")
        self._at += size
        return self._data[self._at - size : self._at]
