"""Compute the figures of `llm.py` from the times of tokens."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.measures import Target


def decode_rate(times: Sequence[Sequence[float]]) -> float:
    """Return tokens/s while all sequences decode, between the last first and the first last token."""
    start, end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
    tokens = sum(bisect_right(stream, end) - bisect_right(stream, start) for stream in times)
    return tokens / (end - start) if end > start else 0.0


def whole_rate(start: float, times: Sequence[Sequence[float]]) -> float:
    """Return tokens per second of a whole run, prefill included."""
    return sum(map(len, times)) / (max(stream[-1] for stream in times) - start)


@dataclass
class Figures:
    """Hold the figures of one engine by round; rates in tokens/s by number of sequences."""

    name: str
    decode: dict[int, list[float]] = field(default_factory=dict)
    whole: dict[int, list[float]] = field(default_factory=dict)
    prefill: list[float] = field(default_factory=list)
    roofline: dict[int, float] = field(default_factory=dict)  # most that the bandwidth allows
    first: dict[int, list[int]] = field(default_factory=dict)  # first token of each sequence
    note: str = ""

    def take(self, result: dict[str, Any], prefill_tokens: int) -> None:
        """Add a round, with the median of several prefills."""
        for run in result["runs"]:
            count = run["concurrency"]
            self.decode.setdefault(count, []).append(decode_rate(run["times"]))
            self.whole.setdefault(count, []).append(whole_rate(run["start"], run["times"]))
            self.first[count] = run["first"]
        self.prefill.append(prefill_tokens / statistics.median(result["prefill"]))
        self.note = result.get("note", "")

    def rates(self, what: int | str) -> list[float]:
        """Return rates by round, of decoding this many sequences or of "prefill"."""
        return self.prefill if isinstance(what, str) else self.decode.get(what, [])

    def agreement(self, other: Figures) -> float:
        """Return the share of sequences with equal first tokens: both compute the same model."""
        pairs = [
            (a, b)
            for c in self.first
            for a, b in zip(self.first[c], other.first.get(c, ()), strict=False)
        ]
        return sum(a == b for a, b in pairs) / len(pairs) if pairs else 0.0


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


# (ours, any of these peers by their beginnings, what, at least)
TARGETS: list[tuple[str, tuple[str, ...], int | str, float]] = [
    ("motet bf16", ("llama.cpp BF16",), 1, 0.95),
    ("motet bf16", ("llama.cpp BF16",), 8, 1.5),
    ("motet bf16", ("llama.cpp BF16",), 32, 2.2),
    ("motet bf16", ("llama.cpp BF16",), "prefill", 1.6),
    ("motet int4", ("llama.cpp Q4_0",), 1, 1.0),
    ("motet int8", ("llama.cpp Q8_0", "llama.cpp Q4_0"), 32, 1.5),
    ("motet bf16", ("vllm",), 32, 1.5),
    ("motet bf16", ("vllm",), "prefill", 1.1),
    ("motet bf16", ("transformers",), 1, 2.2),
    ("motet bf16", ("transformers",), 32, 4.0),
]


def targets(figures: dict[str, Figures]) -> list[Target]:
    """Return the targets that this run can judge, each against the best of the named peers."""
    judged = []
    for ours, names, what, least in TARGETS:
        rivals = [f for name, f in figures.items() if name.startswith(names) and f.rates(what)]
        if ours not in figures or not rivals or not figures[ours].rates(what):
            continue
        best = max(rivals, key=lambda f: statistics.median(f.rates(what)))
        value = ratio(figures[ours].rates(what), best.rates(what))
        label = what if isinstance(what, str) else f"c={what}"
        judged.append(Target(f"{ours} / {best.name}, {label}", value, least, "times", most=False))
    return judged
