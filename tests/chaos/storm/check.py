"""Check a history of clients, and nothing else: this program knows nothing of the servers.

    python -m chaos.storm.check FILE

Answers of a quiet time define what is due. Every other answer is equal, or broken off with an error
after which a client may ask again, or it is a finding: lost (it never ended), wrong (an error that
must not be), changed, or doubled (longer than what is due). Of texts, the longest time between two
parts is a pause; of sounds, a gap is the longest time in which a player would have had nothing to play.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

TEXTS, SOUNDS = ("chat", "seeing"), ("speech",)
FINDINGS = ("lost", "wrong", "changed", "doubled")
VERDICTS = ("equal", "broken", *FINDINGS)


@dataclass(frozen=True)
class Answer:
    """Hold what became of a request. `pause`: seconds, as the module defines it."""

    kind: str
    began: float
    ended: float
    verdict: str
    detail: str = ""
    pause: float = 0.0


@dataclass(frozen=True)
class Report:
    """Hold the answers of a history, without those of its quiet time."""

    answers: list[Answer]

    def count(self, verdict: str, kind: str | None = None) -> int:
        return sum(a.verdict == verdict and kind in (None, a.kind) for a in self.answers)

    @property
    def pause_p99(self) -> float:
        """Return the pause that 99 % of whole texts stay below, in seconds."""
        return _quantile((a.pause for a in self._whole(TEXTS)), 0.99)

    @property
    def gap_p95(self) -> float:
        """Return the gap that 95 % of whole sounds stay below, in seconds."""
        return _quantile((a.pause for a in self._whole(SOUNDS)), 0.95)

    def _whole(self, kinds: Sequence[str]) -> list[Answer]:
        return [a for a in self.answers if a.kind in kinds and a.verdict == "equal"]

    def findings(self) -> list[str]:
        return [f"{a.verdict}: {a.detail}" for a in self.answers if a.verdict in FINDINGS]

    def table(self) -> str:
        kinds = sorted({answer.kind for answer in self.answers})
        lines = ["".join(f"{cell:>14}" for cell in ("", *VERDICTS))]
        for title, kind in [*((kind, kind) for kind in kinds), ("all", None)]:
            counts = (self.count(verdict, kind) for verdict in VERDICTS)
            lines.append("".join(f"{cell!s:>14}" for cell in (title, *counts)))
        lines.append(
            f"pause of texts p99 {self.pause_p99:.2f} s, gap of sounds p95 {self.gap_p95:.2f} s"
        )
        return "\n".join(lines)


def check(path: Path) -> Report:
    """Read a history. Raises ValueError if its quiet time has no answer, or two different ones."""
    asked: dict[int, dict[str, Any]] = {}
    over: dict[int, list[dict[str, Any]]] = {}
    last = 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        last = max(last, entry["at"])
        if "asked" in entry:
            asked[entry["asked"]] = entry
        else:
            over.setdefault(entry["answered"], []).append(entry)
    due = _due(asked, over)
    return Report(
        [
            _judged(request, over.get(number, []), due, last)
            for number, request in asked.items()
            if not request["quiet"]
        ]
    )


def _due(
    asked: dict[int, dict[str, Any]], over: dict[int, list[dict[str, Any]]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the answer of the quiet time by kind and variant."""
    due: dict[tuple[str, int], dict[str, Any]] = {}
    for number, request in asked.items():
        for answer in over.get(number, []) if request["quiet"] else []:
            if "digest" in answer:
                key = request["kind"], request["variant"]
                if due.setdefault(key, answer)["digest"] != answer["digest"]:
                    raise ValueError(
                        f"{key}: the quiet time has two answers; nothing can be compared"
                    )
    return due


def _judged(
    request: dict[str, Any],
    answers: list[dict[str, Any]],
    due: dict[tuple[str, int], dict[str, Any]],
    last: float,
) -> Answer:
    kind, variant, began = request["kind"], request["variant"], request["at"]
    name = f"{kind} {variant}"
    if not answers:
        return Answer(kind, began, last, "lost", f"{name} has no end")
    if (kind, variant) not in due:
        raise ValueError(f"{name}: the quiet time has no answer; nothing can be compared")
    answer, wanted = answers[0], due[kind, variant]
    pause = _gap(answer["pieces"]) if kind in SOUNDS else _pause(answer["pieces"])
    if len(answers) > 1:
        verdict, detail = "doubled", f"{name} ended {len(answers)} times"
    else:
        verdict, detail = _compared(name, answer, wanted)
    return Answer(kind, began, answer["at"], verdict, detail, pause)


def _compared(name: str, answer: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, str]:
    if "error" in answer:
        text, whole = answer.get("text"), wanted.get("text")
        if text and whole and not whole.startswith(text):
            return "changed", f"{name} began as {text[-80:]!r}"
        if not answer["retryable"]:
            return (
                "lost" if answer["error"] == "timeout" else "wrong"
            ), f"{name}: {answer['error']}"
        return "broken", answer["error"]
    if answer["digest"] == wanted["digest"]:
        return "equal", ""
    lengths = answer["length"], wanted["length"]
    verdict = "doubled" if lengths[0] > lengths[1] else "changed"
    return verdict, f"{name}: {lengths[0]} bytes, {lengths[1]} are due"


def _pause(pieces: Sequence[Sequence[float]]) -> float:
    """Return the longest time between two parts."""
    return max((b[0] - a[0] for a, b in pairwise(pieces)), default=0.0)


def _gap(pieces: Sequence[Sequence[float]]) -> float:
    """Return the longest wait of a player that begins with the first part and waits whenever it has none."""
    longest, ready = 0.0, pieces[0][0] if pieces else 0.0  # when all that has come is played
    played = 0.0
    for at, seconds in pieces:
        if played:
            longest = max(longest, at - ready)
        ready = max(ready, at) + seconds - played
        played = seconds
    return longest


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def main(argv: Sequence[str]) -> int:
    report = check(Path(argv[0]))
    print(report.table())
    for finding, count in Counter(report.findings()).items():
        print(f"FINDING {finding} ({count})")
    return 1 if report.findings() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
