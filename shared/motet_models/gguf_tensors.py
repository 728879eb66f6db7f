"""List the tensors of a GGUF file from its header, and count the bytes that they take in memory.

Only names, types and shapes are read; what a served file is read with, and what it refuses, is in
the LLM service. The beginning of a file is enough (`Incomplete` asks for more of it).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motet_shared.errors import ConfigError

from .weight_formats import PANEL, SMALL_BYTES, CheckpointCodes, WeightFormat

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of scalars
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_SPAN = 256
_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
# Other types by ggml's numbers: F32, F16, BF16.
_PLAIN = {0: 4, 1: 2, 30: 2}


@dataclass(frozen=True, slots=True)
class _Coded:
    """Describe codes in memory.

    bits: per code on a CPU; GPUs take at least 4. group: weights of a scale. shifts: as many shifts as
    scales. spans: a scale is a byte times a float32 of 256 weights, else a float16.
    """

    bits: int
    group: int = 32
    shifts: bool = False
    spans: bool = False

    def bytes_of(self, elements: int, on_gpu: bool) -> int:
        """Return the bytes of a matrix. A GPU has each scale whole, in float32 where it is a product."""
        count, numbers = elements // self.group, 1 + self.shifts
        if self.spans and not on_gpu:
            scales = numbers * (count + 4 * (elements // _SPAN))
        else:
            scales = numbers * count * (4 if self.spans else 2)
        bits = max(self.bits, 4) if on_gpu else self.bits
        return elements * bits // 8 + scales


_CODED = {
    2: _Coded(4),  # Q4_0
    3: _Coded(4, shifts=True),  # Q4_1
    6: _Coded(8),  # Q5_0
    7: _Coded(8, shifts=True),  # Q5_1
    8: _Coded(8),  # Q8_0
    10: _Coded(2, 16, shifts=True, spans=True),  # Q2_K
    11: _Coded(4, 16, spans=True),  # Q3_K
    12: _Coded(4, shifts=True, spans=True),  # Q4_K
    13: _Coded(8, shifts=True, spans=True),  # Q5_K
    14: _Coded(8, 16, spans=True),  # Q6_K
    20: _Coded(4),  # IQ4_NL
    23: _Coded(4, spans=True),  # IQ4_XS
    39: _Coded(4),  # MXFP4
}


class Incomplete(Exception):
    """More of the file is needed."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Name a tensor, its type by ggml's number, its inputs and its rows; rows 0: a vector."""

    name: str
    kind: int
    inputs: int
    rows: int

    @property
    def padded(self) -> int:
        """Return the number of elements, with rows padded to whole panels."""
        return self.inputs * -(-self.rows // PANEL) * PANEL


def parts_of(path: Path) -> list[Path]:
    """Return all parts of a split file, given any of them; `[path]` for a whole one."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def read_tensors(path: Path) -> list[GgufTensor]:
    """Return the tensors of a file and its other parts. Raises ConfigError if one is unreadable."""
    found: list[GgufTensor] = []
    for part in parts_of(path):
        try:
            with (
                part.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                found += parse_tensors(data)
        except (OSError, ValueError, Incomplete) as error:
            raise ConfigError(f"{part} cannot be read: {error}; copy it again") from error
    return found


def parse_tensors(data: bytes | mmap.mmap) -> list[GgufTensor]:
    """Return the tensors that a header lists. Raises Incomplete, and ValueError if it is no GGUF."""
    return _Parser(data).tensors()


def codes_of_tensors(
    tensors: Sequence[GgufTensor], format: WeightFormat, *, on_gpu: bool
) -> CheckpointCodes:
    """Return the codes of a file. format: of matrices that are not in codes.

    Raises ConfigError for a type that is not read.
    """
    total = coded = elements = 0
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    for tensor in tensors:
        kind = _CODED.get(tensor.kind)
        if kind is not None:
            coded += kind.bytes_of(tensor.padded, on_gpu)
            elements += tensor.padded
        elif tensor.kind not in _PLAIN:
            raise ConfigError(
                f"{tensor.name} is of ggml's type {tensor.kind}, which is not read; give a file of"
                " another type"
            )
        elif not tensor.rows:
            total += tensor.inputs * SMALL_BYTES
        elif tensor.name == "token_embd.weight" and not (tied and format.bits >= 16):
            head = format.matrix_bytes(tensor.padded, 0) if tied else 0
            total += tensor.inputs * tensor.rows * format.table_bytes + head
        else:
            total += format.matrix_bytes(tensor.padded, 0)
    bits = 8 * coded / max(elements, 1)
    whole = int(bits) if elements else format.bits
    mean = WeightFormat(
        name="GGUF", bits=whole, group=_SPAN, group_bytes=round((bits - whole) * _SPAN / 8)
    )
    return CheckpointCodes(format=mean, total=total + coded)


class _Parser:
    def __init__(self, data: bytes | mmap.mmap):
        self._data, self._at = data, 0

    def tensors(self) -> list[GgufTensor]:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin as GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, not 2 or 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        for _ in range(num_fields):
            self._skip(self._number("Q"))
            self._skip_value(self._number("I"))
        return [self._tensor() for _ in range(num_tensors)]

    def _tensor(self) -> GgufTensor:
        name = self._take(self._number("Q")).decode("utf-8", "replace")
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        inputs, *others = [self._number("Q") for _ in range(dimensions)]
        kind = self._number("I")
        self._skip(8)  # its offset
        return GgufTensor(name, kind, inputs, math.prod(others) if others else 0)

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
                return
            if inner != _STRING:
                raise ValueError(f"an array of type {inner}")
            for _ in range(count):
                self._skip(self._number("Q"))
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value of type {kind}")

    def _number(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]
        return value

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise Incomplete(f"{size} bytes at {self._at} of {len(self._data)}")
        self._at += size

    def _take(self, size: int) -> bytes:
        start = self._at
        self._skip(size)
        return bytes(self._data[start : self._at])
