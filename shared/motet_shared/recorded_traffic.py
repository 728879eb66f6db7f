"""Decode lines of recorded traffic, which `motet bench` replays and `motet plan` simulates.

Motet's format: `{"arrival": 0.5, "prompt": "text", "max_tokens": 64}`, or instead of the prompt its
length, `"tokens": 128`, and optionally `"prefix": "a", "prefix_tokens": 512`: requests with the
same prefix id begin with the same words.

Mooncake's format: `{"timestamp": 27482, "input_length": 6955, "output_length": 52,
"hash_ids": [46, 47]}`, with milliseconds, and one hash per block of 512 tokens: equal hashes become
equal text. https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

MOONCAKE_BLOCK = 512  # tokens per hash
MOTET_FORM = '{"arrival": 0.5, "tokens": 128, "max_tokens": 64}'
MOONCAKE_FORM = '{"timestamp": 500, "input_length": 128, "output_length": 64, "hash_ids": [1]}'


class MotetLine(Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold a request in Motet's format; arrival in seconds, lengths in tokens."""

    arrival: float
    max_tokens: int
    prompt: str | None = None
    tokens: int | None = None
    prefix: str | None = None
    prefix_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.tokens is None):
            raise ValueError('give either "prompt" or "tokens"')
        if (self.prefix is None) != (self.prefix_tokens is None):
            raise ValueError('"prefix" and "prefix_tokens" go together')
        _check_bounds(
            1, max_tokens=self.max_tokens, tokens=self.tokens, prefix_tokens=self.prefix_tokens
        )
        _check_bounds(0, arrival=self.arrival)
        if self.prompt == "":
            raise ValueError('"prompt" is empty')


class MooncakeLine(Struct, kw_only=True):
    """Hold a request in Mooncake's format; timestamp in milliseconds, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        _check_bounds(0, timestamp=self.timestamp)
        _check_bounds(1, input_length=self.input_length, output_length=self.output_length)


_decode_motet = msgspec.json.Decoder(MotetLine).decode
_decode_mooncake = msgspec.json.Decoder(MooncakeLine).decode


def decode_line(line: bytes) -> MotetLine | MooncakeLine:
    """Return the request of a line.

    Raises ValueError that names the field. Too deep nesting is a ValueError, too.
    """
    try:
        return _decode_mooncake(line) if b'"timestamp"' in line else _decode_motet(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _check_bounds(low: float, **fields: float | None) -> None:
    for name, value in fields.items():
        if value is not None and not low <= value < math.inf:
            raise ValueError(f'"{name}" is {value:g}; give a number of at least {low:g}')
