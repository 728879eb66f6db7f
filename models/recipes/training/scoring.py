"""Score what a pipeline makes of held-out prompts, by kind, with the commonest failures."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Asked = TypeVar("Asked")
Made = TypeVar("Made")


class Verdict(NamedTuple):
    """Say whether one that was made is right; `reason` says why not. kind: of what was asked."""

    kind: str
    correct: bool
    reason: str


def shares(
    prompts: Sequence[tuple[str, Asked]],
    make: Callable[[list[str], int], Sequence[Made]],
    judge: Callable[[Made, Asked], Verdict],
    *,
    batch: int,
) -> dict[str, Any]:
    """Return the share of right ones, by kind too, and the commonest failures.

    prompts: with what they ask for. make: makes one of each of some prompts; it is given the seed of
    the first. batch: prompts at a time.
    """
    correct: Counter[str] = Counter()
    total: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for first in range(0, len(prompts), batch):
        chunk = prompts[first : first + batch]
        found = make([text for text, _ in chunk], first)
        for (_, asked), one in zip(chunk, found, strict=True):
            verdict = judge(one, asked)
            total[verdict.kind] += 1
            correct[verdict.kind] += verdict.correct
            if not verdict.correct:
                failures[verdict.reason] += 1
    return {
        "right": round(correct.total() / total.total(), 3),
        **{kind: round(correct[kind] / total[kind], 3) for kind in sorted(total)},
        "wrong": dict(failures.most_common(8)),
    }


def scoring_parser(text: str | None, steps: int, guidance: float) -> argparse.ArgumentParser:
    """Return the arguments of an evaluation; `steps`, `guidance`: the recipe's."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200, help="number of held-out prompts")
    parser.add_argument("--steps", type=int, default=steps, help="denoising steps")
    parser.add_argument("--guidance", type=float, default=guidance)
    return parser
