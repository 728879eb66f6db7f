"""What became of every question that was asked in a storm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from chaos.storm.check import VERDICTS, Answer, Report

COMPLETED = 0.95  # of all questions, at least
GROWTH = 64 << 20  # bytes of one process, at most
_AFTERMATH = 10.0  # seconds after a blow in which it may still be felt


@dataclass(frozen=True)
class Blow:
    """`began`, `ended`: on the clock of the answers."""

    kind: str
    name: str
    began: float
    ended: float

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name.partition('-')[0]}"

    def felt_by(self, answer: Answer) -> bool:
        """Whether the question was under way during the blow."""
        return answer.began <= self.ended and answer.ended >= self.began

    def may_break(self, answer: Answer) -> bool:
        return answer.began <= self.ended + _AFTERMATH and answer.ended >= self.began


@dataclass(frozen=True)
class Account:
    """Join the clients' report with what was done to the servers, and what they say of themselves.

    died: processes that ended and were not struck. left: complaints of idle services. growth: bytes.
    """

    report: Report
    blows: list[Blow]
    died: list[str]
    left: list[str]
    growth: dict[str, int]

    @property
    def answers(self) -> list[Answer]:
        return self.report.answers

    @property
    def broken(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.verdict == "broken"]

    @property
    def completed(self) -> float:
        """The share of the questions that were answered as in a quiet time, at the first try."""
        return self.report.count("equal") / max(len(self.answers), 1)

    def findings(self) -> list[str]:
        """What must not be, in words; empty after a clean storm."""
        found = self.report.findings()
        found += [f"{name} died by itself" for name in self.died]
        found += [f"left behind: {complaint}" for complaint in self.left]
        found += [
            f"{name} has grown by {size >> 20} MB"
            for name, size in self.growth.items()
            if size > GROWTH
        ]
        calm = [a for a in self.broken if not any(blow.may_break(a) for blow in self.blows)]
        found += [f"broken off though nothing had happened: {a.kind}: {a.detail}" for a in calm]
        if self.completed < COMPLETED:
            found.append(f"{self.completed:.1%} completed, at least {COMPLETED:.0%} should be")
        return found

    def table(self) -> str:
        """Questions by the kind of blow that they felt, and by their own kind."""
        titles = sorted({blow.title for blow in self.blows})
        lines = [_line("", "blows", *VERDICTS, "slowest s")]
        for title in titles:
            blows = [blow for blow in self.blows if blow.title == title]
            felt = [a for a in self.answers if any(blow.felt_by(a) for blow in blows)]
            lines.append(_row(title, len(blows), felt))
        calm = [a for a in self.answers if not any(blow.felt_by(a) for blow in self.blows)]
        lines.append(_row("(none)", 0, calm))
        for kind in sorted({answer.kind for answer in self.answers}):
            lines.append(_row(f"  {kind}", "", [a for a in self.answers if a.kind == kind]))
        lines.append(_row("all", len(self.blows), self.answers))
        lines.append(
            f"{self.completed:.1%} completed at the first try; pause of texts p99 {self.report.pause_p99:.2f} s,"
            f" gap of sounds p95 {self.report.gap_p95:.2f} s; most growth {self._most_growth()}"
        )
        return "\n".join(lines)

    def _most_growth(self) -> str:
        if not self.growth:
            return "unknown: nobody lived through all of it"
        name, size = max(self.growth.items(), key=lambda item: item[1])
        return f"{size / 2**20:.1f} MB ({name})"


def _row(title: str, blows: object, answers: Iterable[Answer]) -> str:
    found = list(answers)
    counts = Counter(answer.verdict for answer in found)
    slowest = max((answer.ended - answer.began for answer in found), default=0.0)
    return _line(title, blows, *(counts[verdict] for verdict in VERDICTS), f"{slowest:.1f}")


def _line(title: str, *cells: object) -> str:
    return f"{title:18}" + "".join(f"{cell!s:>11}" for cell in cells)
