"""Read the workload of `motet bench --trace` from a file, one JSON object per line.

Motet's format: `{"arrival": 0.5, "prompt": "text", "max_tokens": 64}`, or instead of the prompt its
length, `"tokens": 128`, and optionally `"prefix": "a", "prefix_tokens": 512`: requests with the
same prefix id begin with the same words.

Mooncake's format: `{"timestamp": 27482, "input_length": 6955, "output_length": 52,
"hash_ids": [46, 47]}`, with milliseconds, and one hash per block of 512 tokens: equal hashes become
equal text. https://github.com/kvcache-ai/Mooncake (FAST25-release/traces)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from motet_cli.bench import words
from motet_cli.bench.request import Request
from motet_cli.bench.tokens_per_word import TokensPerWord
from motet_shared.errors import ConfigError

MOONCAKE_BLOCK = 512  # tokens per hash
_FORMS = (
    '{"arrival": 0.5, "tokens": 128, "max_tokens": 64}'
    ' or {"timestamp": 500, "input_length": 128, "output_length": 64, "hash_ids": [1]}'
)


class _Line(Struct, forbid_unknown_fields=True, kw_only=True):
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
        _at_least(
            1, max_tokens=self.max_tokens, tokens=self.tokens, prefix_tokens=self.prefix_tokens
        )
        _at_least(0, arrival=self.arrival)
        if self.prompt == "":
            raise ValueError('"prompt" is empty')


class _Mooncake(Struct, kw_only=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        _at_least(0, timestamp=self.timestamp)
        _at_least(1, input_length=self.input_length, output_length=self.output_length)


def _at_least(low: float, **fields: float | None) -> None:
    for name, value in fields.items():
        if value is not None and not value >= low:
            raise ValueError(f'"{name}" is {value:g}; give at least {low:g}')


class Trace:
    """Hold the checked lines of a trace file and generate requests from them."""

    def __init__(self, path: Path, seed: int):
        """Read the file.

        Raises ConfigError that names file and line, or if the file is empty or unreadable.
        """
        self.path = path
        self._seed = seed
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(
                f"--trace: cannot read {str(path)!r}: {error.strerror}; give a JSONL file",
                param="--trace",
            ) from None
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not numbered:
            raise ConfigError(
                f"--trace: {str(path)!r} is empty; give one JSON object per request and line",
                param="--trace",
            )
        self._lines = [_parse(path, number, line) for number, line in numbered]

    def __len__(self) -> int:
        return len(self._lines)

    def requests(self, scale: TokensPerWord, speed: float = 1.0) -> list[Request]:
        """Return the requests in order of arrival, the first at 0; `speed` divides all times."""
        found = [self._request(line, scale) for line in self._lines]
        first = min(request.arrival for request in found)
        moved = [Request((r.arrival - first) / speed, r.prompt, r.max_tokens) for r in found]
        return sorted(moved, key=lambda request: request.arrival)

    def _request(self, line: tuple[int, _Line | _Mooncake], scale: TokensPerWord) -> Request:
        number, entry = line
        if isinstance(entry, _Mooncake):
            return Request(
                entry.timestamp / 1000, self._of_blocks(number, entry, scale), entry.output_length
            )
        prompt = entry.prompt
        if prompt is None:
            prompt = words.draw(
                Random(f"{self._seed}/line/{number}"), scale.words(entry.tokens or 1)
            )
        if entry.prefix is not None:
            count = scale.words(entry.prefix_tokens or 1, with_overhead=False)
            prompt = f"{words.draw(Random(f'{self._seed}/prefix/{entry.prefix}'), count)} {prompt}"
        return Request(entry.arrival, prompt, entry.max_tokens)

    def _of_blocks(self, number: int, entry: _Mooncake, scale: TokensPerWord) -> str:
        total = scale.words(entry.input_length)
        block = scale.words(MOONCAKE_BLOCK, with_overhead=False)
        texts: list[str] = []
        for name in [f"block/{hashed}" for hashed in entry.hash_ids] or [f"line/{number}"]:
            if total > 0:
                count = min(total, block) if entry.hash_ids else total
                texts.append(words.draw(Random(f"{self._seed}/{name}"), count))
                total -= count
        if total > 0:  # the hashes cover less than the input
            texts.append(words.draw(Random(f"{self._seed}/line/{number}"), total))
        return " ".join(texts)


_decode_line: Callable[[bytes], _Line] = msgspec.json.Decoder(_Line).decode
_decode_mooncake: Callable[[bytes], _Mooncake] = msgspec.json.Decoder(_Mooncake).decode


def _parse(path: Path, number: int, line: bytes) -> tuple[int, _Line | _Mooncake]:
    try:
        return number, _decode_mooncake(line) if b'"timestamp"' in line else _decode_line(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--trace: line {number} of {str(path)!r}: {error}; give {_FORMS}", param="--trace"
        ) from None
