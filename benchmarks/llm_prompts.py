"""The prompts of `llm.py`: the same for every engine. Standard library only, for other environments' interpreters."""

from __future__ import annotations

import random
from collections.abc import Callable

Prompts = Callable[[int, int, int], list[list[int]]]


def prompts_of(vocab: int) -> Prompts:
    """(count, length, run) → prompts. No two begin alike, so that no prefix cache hits."""

    def prompts(count: int, length: int, run: int) -> list[list[int]]:
        draw = random.Random(f"{count} {length} {run}")
        return [[draw.randrange(vocab) for _ in range(length)] for _ in range(count)]

    return prompts
