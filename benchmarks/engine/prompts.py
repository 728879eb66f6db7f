"""Generate the prompts of `llm.py`, with the standard library only, for other interpreters."""

from __future__ import annotations

import random
from collections.abc import Callable

Prompts = Callable[[int, int, int], list[list[int]]]


def prompts_of(vocab: int) -> Prompts:
    """Return a function (count, length, run) → prompts without common prefixes."""

    def prompts(count: int, length: int, run: int) -> list[list[int]]:
        draw = random.Random(f"{count} {length} {run}")
        return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]

    return prompts
