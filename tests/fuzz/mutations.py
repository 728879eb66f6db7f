"""Damage done to messages: to the value before it is packed, and to the bytes after. A seed makes it repeatable."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from typing import Any

import msgpack

Path = tuple[Any, ...]  # keys and indices from the root to a node
_DEEP = 400  # deeper than any recursion that a decoder allows itself
_MARKERS = (
    0xC1,
    0xC6,
    0xC9,
    0xD9,
    0xDB,
    0xDC,
    0xDD,
    0xDE,
    0xDF,
)  # reserved, and headers of lengths that are a lie

SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 0.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf),
    *(
        "",
        "x",
        "open",
        "\x00",
        "é",
        "💥" * 50,
        "a.b.>",
        "*",
        "../../etc/passwd",
        "x" * 5000,
        "1" * 400,
    ),
    *(b"", b"\x00", b"\xff" * 64, msgpack.Timestamp(2**33, 1), msgpack.ExtType(5, b"??")),
)
CONTAINERS: tuple[Any, ...] = (
    *(
        [],
        {},
        [None],
        [[]],
        {"": None},
        {"type": "open"},
        {1: 2},
        [0] * 1000,
        ["x"] * 100,
        {str(i): i for i in range(99)},
    ),
    *(["i", 1, 0, ["t", [1]]], ["!", 1, 0, "?", "?"], ["e", 2**62, 2**62], ["k", 1, "x", []]),
)


class Fuzzer:
    """Damages messages. All that it does follows from the seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        # A half of the damage leaves MessagePack that can be read, so that what reads the fields is reached too.
        self._ways: list[tuple[int, Callable[[Any], bytes]]] = [
            (2, self._whole),
            (10, self._with_other_values),
            (4, self._with_bent_bytes),
            (1, self._cut),
            (1, self._noise),
            (1, self._nested),
            (1, self._with_a_lie),
        ]

    def message(self, value: Any) -> bytes:
        """The bytes of `value`, which is left as it is, with some damage or none."""
        weights = [weight for weight, _ in self._ways]
        (_, way), *_ = self.random.choices(self._ways, weights)
        return way(value)

    # ------------------------------------------------------------------------------------------------- before packing
    def _whole(self, value: Any) -> bytes:
        return packed(value)

    def _with_other_values(self, value: Any) -> bytes:
        return packed(self.damaged(value))

    def damaged(self, value: Any) -> Any:
        """A copy in which one to three places hold something else, hold it twice, in another order or not at all."""
        tree = _copy(value)
        for _ in range(self.random.choice((1, 1, 2, 3))):
            tree = self._changed(tree)
        return tree

    def _changed(self, tree: Any) -> Any:
        path = self.random.choice(list(_paths(tree)))
        if not path:
            return self._other(tree)
        parent = _at(tree, path[:-1])
        if isinstance(parent, list) and self.random.random() < 0.3:
            self._rearrange(parent, path[-1])
        elif isinstance(parent, dict) and self.random.random() < 0.2:
            self._rekey(parent, path[-1])
        else:
            parent[path[-1]] = self._other(parent[path[-1]])
        return tree

    def _other(self, value: Any) -> Any:
        """Often a neighbour of the value, so that it has the right type."""
        if self.random.random() < 0.4:
            if isinstance(value, bool):
                return not value
            if isinstance(value, int):
                return max(
                    -(2**63),
                    min(value + self.random.choice((-1, 1, 7, -(2**31), 2**31)), 2**64 - 1),
                )
            if isinstance(value, float):
                return value * self.random.choice((-1, 0, 1e9, math.inf))
            if isinstance(value, str):
                return self._other_text(value)
        return _copy(self.random.choice(SCALARS if self.random.random() < 0.8 else CONTAINERS))

    def _other_text(self, text: str) -> str:
        at = self.random.randrange(len(text) + 1)
        return self.random.choice(
            (text[:at], text[at:], text[:at] + "\x00" + text[at:], text * 3, text.upper())
        )

    def _rearrange(self, items: list[Any], index: int) -> None:
        item = items.pop(index)
        for _ in range(self.random.choice((0, 1, 2))):  # gone, elsewhere, or twice
            items.insert(self.random.randrange(len(items) + 1), item)

    def _rekey(self, fields: dict[Any, Any], key: Any) -> None:
        value = fields.pop(key)
        if self.random.random() < 0.5:
            fields[
                self.random.choice(("", "unknown", 5, key * 2 if isinstance(key, str) else None))
            ] = value

    # -------------------------------------------------------------------------------------------------- after packing
    def _with_bent_bytes(self, value: Any) -> bytes:
        data = bytearray(packed(value))
        for _ in range(self.random.choice((1, 1, 2, 4, 16))):
            if data:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def _cut(self, value: Any) -> bytes:
        data = packed(value)
        at = self.random.randrange(len(data) + 1)
        return data[:at] if self.random.random() < 0.7 else data + data[at:]

    def _noise(self, value: Any) -> bytes:
        return self.random.randbytes(self.random.randrange(200))

    def _nested(self, value: Any) -> bytes:
        """A value deep inside lists or maps, at the end of a message that begins well."""
        head = packed(value)[: self.random.choice((0, 0, 40))]
        return (
            head
            + self.random.choice((b"\x91", b"\x81\xa1x")) * self.random.randrange(_DEEP)
            + b"\xc0"
        )

    def _with_a_lie(self, value: Any) -> bytes:
        """Somewhere begins a string or a list of many millions."""
        data = bytearray(packed(value))
        at = self.random.randrange(len(data) + 1)
        data[at : at + 5] = bytes([self.random.choice(_MARKERS)]) + struct.pack(
            ">I", self.random.getrandbits(32)
        )
        return bytes(data)


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value, strict_types=False)
    return data


def _paths(value: Any, at: Path = ()) -> list[Path]:
    """Of every node, the root first."""
    found = [at]
    if isinstance(value, dict):
        for key, part in value.items():
            found += _paths(part, (*at, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            found += _paths(part, (*at, index))
    return found


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, (list, tuple)) else value
