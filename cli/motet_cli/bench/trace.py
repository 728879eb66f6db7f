"""Read the workload of `motet bench --trace` from a file, one JSON object per line.

`motet_shared.recorded_traffic` documents the formats.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from motet_cli.bench import words
from motet_cli.bench.request import Request
from motet_cli.bench.tokens_per_word import TokensPerWord
from motet_shared.errors import ConfigError
from motet_shared.recorded_traffic import (
    MOONCAKE_BLOCK,
    MOONCAKE_FORM,
    MOTET_FORM,
    MooncakeLine,
    MotetLine,
    decode_line,
)

_FORMS = f"{MOTET_FORM} or {MOONCAKE_FORM}"


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

    def _request(self, line: tuple[int, MotetLine | MooncakeLine], scale: TokensPerWord) -> Request:
        number, entry = line
        if isinstance(entry, MooncakeLine):
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

    def _of_blocks(self, number: int, entry: MooncakeLine, scale: TokensPerWord) -> str:
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


def _parse(path: Path, number: int, line: bytes) -> tuple[int, MotetLine | MooncakeLine]:
    try:
        return number, decode_line(line)
    except ValueError as error:
        raise ConfigError(
            f"--trace: line {number} of {str(path)!r}: {error}; give {_FORMS}", param="--trace"
        ) from None
