"""Find NaN and infinity in safetensors files from their bits, at memory speed.

A floating-point number is not finite if all its exponent bits are ones. Read as integers of the
same width, these are the largest integers of each sign, so two maxima per block find them, without
a copy and without converting bfloat16 or float8.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet_shared.errors import ConfigError

BLOCK = 1 << 20  # bytes that are checked together: they stay in the processor's cache
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library
# By safetensors type: bytes per number, and the smallest positive bits that are not finite.
_KINDS = {
    "F64": (8, 0x7FF0000000000000),
    "F32": (4, 0x7F800000),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F8_E5M2": (1, 0x7C),
    "F8_E4M3": (1, 0x7F),  # has NaN, no infinity
}


@dataclass(frozen=True)
class _Tensor:
    """Hold an entry of a safetensors header."""

    name: str
    kind: str
    shape: list[int]
    start: int  # bytes from the beginning of the file
    end: int


def check_weights(folder: Path, without: re.Pattern[str] | None = None) -> None:
    """Raise ConfigError for the first non-finite number in the folder's *.safetensors.

    Every number of a floating type is checked: weights, biases, and the scales of quantized
    formats. Malformed files are left to the loader, whose errors are more specific. without: names
    of tensors to skip.
    """
    for path in sorted(folder.glob("*.safetensors")):
        check_file(path, without)


def check_file(path: Path, without: re.Pattern[str] | None = None) -> None:
    """Raise ConfigError for a non-finite number in one safetensors file."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        wanted = (one for one in _tensors(data) if without is None or not without.search(one.name))
        found = next(filter(None, (_fault(one, data) for one in wanted)), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return  # truncated, unreadable or not safetensors: the loader reports the cause
    if found is not None:
        raise ConfigError(
            f"{path}: {found}; copy the checkpoint again, or give the original weights"
        )


def _tensors(data: mmap.mmap) -> Iterator[_Tensor]:
    """Yield the tensors of floating types that the header lists."""
    (length,) = struct.unpack("<Q", data[:8])
    if length > _LONGEST_HEADER:
        return
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in _KINDS:
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        if 8 + length <= start <= end <= len(data):
            yield _Tensor(name, entry["dtype"], entry["shape"], start, end)


def _fault(tensor: _Tensor, data: mmap.mmap) -> str | None:
    """Describe the first non-finite number of the tensor; return None if all are finite."""
    width, lowest = _KINDS[tensor.kind]
    bits = np.frombuffer(data, f"<u{width}", (tensor.end - tensor.start) // width, tensor.start)
    step = BLOCK // width
    for first in range(0, len(bits), step):
        block = bits[first : first + step]
        if block.view(f"<i{width}").max() < lowest and block.max() < lowest + (
            1 << (8 * width - 1)
        ):
            continue
        unsigned = block & np.array((1 << (8 * width - 1)) - 1, block.dtype)
        at = int((unsigned >= lowest).argmax())
        place = [int(i) for i in np.unravel_index(first + at, tensor.shape)] if tensor.shape else []
        return f"{tensor.name}{place or ''} is {_name(tensor.kind, int(unsigned[at]), lowest)}"
    return None


def _name(kind: str, bits: int, lowest: int) -> str:
    return "infinite" if bits == lowest and kind != "F8_E4M3" else "NaN"
