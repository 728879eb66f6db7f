"""What became of every question that was asked in a storm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from chaos.storm.check import VERDICTS, Answer, Report
from chaos.storm.stack import STORE

COMPLETED = 0.99  # of all requests, at least, but for those that felt a blow to both ends
_LONG = 15.0  # seconds of an answer that is worth a line
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
        return f"{self.kind} {self.service}"

    @property
    def service(self) -> str:
        return self.name.partition("-")[0]

    def felt_by(self, answer: Answer) -> bool:
        """Whether the question was under way during the blow."""
        return answer.began <= self.ended and answer.ended >= self.began

    def may_break(self, answer: Answer) -> bool:
        return answer.began <= self.ended + _AFTERMATH and answer.ended >= self.began


@dataclass(frozen=True)
class Resources:
    """Hold what a process has, or by how much that has grown. `memory`: resident bytes."""

    memory: int
    descriptors: int = 0
    threads: int = 0

    def since(self, before: Resources) -> Resources:
        """Return the growth since `before`."""
        return Resources(
            self.memory - before.memory,
            self.descriptors - before.descriptors,
            self.threads - before.threads,
        )


GROWTH = Resources(memory=64 << 20, descriptors=32, threads=16)  # of one process, at most


@dataclass(frozen=True)
class Account:
    """Join the clients' report with what was done to the servers, and what they say of themselves.

    died: processes that ended and were not struck. left: complaints of idle services. growth: of
    each process that lived through all of it.
    """

    report: Report
    blows: list[Blow]
    died: list[str]
    left: list[str]
    growth: dict[str, Resources]

    @property
    def answers(self) -> list[Answer]:
        return self.report.answers

    @property
    def broken(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.verdict == "broken"]

    @property
    def completed(self) -> float:
        """The share of the requests that were answered as in a quiet time, at the first try.

        Those that felt a blow to a gateway and the descriptor store at once are not counted.
        """
        counted = [answer for answer in self.answers if not self._lost_both_ends(answer)]
        return sum(answer.verdict == "equal" for answer in counted) / max(len(counted), 1)

    def _lost_both_ends(self, answer: Answer) -> bool:
        return any(store.may_break(answer) for store, _ in self._both_ends)

    @cached_property
    def _both_ends(self) -> list[tuple[Blow, Blow]]:
        """Blows to the descriptor store, each with the one to a gateway at the same time."""
        return [
            (store, gateway)
            for store in self.blows
            for gateway in self.blows
            if (store.service, gateway.service) == (STORE, "gateway")
            and store.began == gateway.began
        ]

    def findings(self) -> list[str]:
        """What must not be, in words; empty after a clean storm."""
        found = self.report.findings()
        found += [f"{name} died by itself" for name in self.died]
        found += [f"left behind: {complaint}" for complaint in self.left]
        found += [
            f"{name} has {getattr(grown, what)} more of {what}"
            for name, grown in self.growth.items()
            for what in ("memory", "descriptors", "threads")
            if getattr(grown, what) > getattr(GROWTH, what)
        ]
        calm = [a for a in self.broken if not any(blow.may_break(a) for blow in self.blows)]
        found += [f"broken off though nothing had happened: {a.kind}: {a.detail}" for a in calm]
        if self.completed < COMPLETED:
            found.append(f"{self.completed:.1%} completed, at least {COMPLETED:.0%} should be")
        return found

    def remarkable(self) -> list[str]:
        """Return lines of the answers that were not equal or took long, with the blows that they felt."""
        start = min((blow.began for blow in self.blows), default=0.0)
        lines = []
        for answer in self.answers:
            seconds = answer.ended - answer.began
            if answer.verdict != "equal" or seconds > _LONG:
                felt = ", ".join(f"{b.kind} {b.name}" for b in self.blows if b.felt_by(answer))
                lines.append(
                    f"{answer.began - start:7.1f} s  {answer.kind}: {answer.verdict} after {seconds:.1f} s"
                    f" {answer.detail} ({felt or 'no blow'})"
                )
        return lines

    def table(self) -> str:
        """Return the requests by the kind of blow that they felt, and by their own kind."""
        titles = sorted({blow.title for blow in self.blows})
        lines = [_line("", "blows", *VERDICTS, "slowest s")]
        for title in titles:
            blows = [blow for blow in self.blows if blow.title == title]
            felt = [a for a in self.answers if any(blow.felt_by(a) for blow in blows)]
            lines.append(_row(title, len(blows), felt))
        if self._both_ends:
            felt = [answer for answer in self.answers if self._lost_both_ends(answer)]
            lines.append(_row("store and gateway", len(self._both_ends), felt))
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
        most = {
            what: max((getattr(grown, what), name) for name, grown in self.growth.items())
            for what in ("memory", "descriptors", "threads")
        }
        memory, name = most.pop("memory")
        counts = (f"{count} {what} ({name})" for what, (count, name) in most.items())
        return ", ".join((f"{memory / 2**20:.1f} MB ({name})", *counts))


def _row(title: str, blows: object, answers: Iterable[Answer]) -> str:
    found = list(answers)
    counts = Counter(answer.verdict for answer in found)
    slowest = max((answer.ended - answer.began for answer in found), default=0.0)
    return _line(title, blows, *(counts[verdict] for verdict in VERDICTS), f"{slowest:.1f}")


def _line(title: str, *cells: object) -> str:
    return f"{title:18}" + "".join(f"{cell!s:>11}" for cell in cells)
