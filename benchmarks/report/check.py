"""Measure the targets that take a minute again, and compare them with the ones that were kept.

`python benchmarks/run.py check --help`. Each benchmark of `CHECKS` runs as a process of its own, one
after the other, with fewer rounds than for its own table. A value that is worse than the kept one
by more than `--tolerance` is marked, and the command ends with 1. Values that are no ratios are shown
only: they depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.runs import measured
from benchmarks.report.summary import TARGETS_FOLDER, Kept, figure, kept
from benchmarks.support.document import conditions, load_line
from benchmarks.support.measures import Target, table

CHECKS: dict[str, tuple[str, ...]] = {
    "codes": ("--threads", "1", "--steps", "40"),
    "kept_connections": ("--seconds", "0.5", "--repeats", "8"),
    "plumbing": ("--no-peer", "--seconds", "0.5", "--repeats", "3"),
    "first_paint": ("--rounds", "3"),
}
TOLERANCE = 0.1
TIMEOUT = 600.0  # seconds for one benchmark
_RATIOS = ("", "times", "of it", "of those without", "of real time", "of the whole", "%")


@dataclass(frozen=True)
class Compared:
    """Hold a target that was measured again, beside the kept one."""

    name: str
    kept: Target
    now: Target

    @property
    def is_ratio(self) -> bool:
        return self.kept.unit in _RATIOS

    @property
    def change(self) -> float:
        """Return by which share the value is better (positive) or worse than the kept one."""
        if not self.kept.value:
            return 0.0
        share = self.now.value / self.kept.value - 1
        return -share if self.kept.most else share

    def is_worse(self, tolerance: float) -> bool:
        return self.is_ratio and self.change < -tolerance


def compared(before: Kept, now: Kept) -> Iterator[Compared]:
    """Yield the targets that both runs have."""
    by_name = {target.what: target for target in before.targets}
    for target in now.targets:
        if target.what in by_name:
            yield Compared(now.name, by_name[target.what], target)


def report(found: Sequence[Compared], tolerance: float) -> str:
    rows = [
        [
            one.name,
            one.now.what,
            figure(one.kept.value),
            figure(one.now.value),
            f"{one.change:+.0%}",
            "**worse**" if one.is_worse(tolerance) else ("" if one.is_ratio else "not a ratio"),
        ]
        for one in found
    ]
    return table(["benchmark", "target", "kept", "now", "better by", ""], rows)


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="check", description="Measure targets again, beside the ones that were kept."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="(default: 0.1)")
    args = parser.parse_args(None if argv is None else list(argv))
    if unknown := sorted(set(args.names) - set(CHECKS)):
        parser.error(f"NAME {unknown[0]!r} is not one of {', '.join(CHECKS)}")
    before = conditions()
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or CHECKS:
            path = TARGETS_FOLDER / f"{name}.json"
            if not path.exists():
                print(f"{name}: nothing was kept; `make bench ARGS='summary --take FILE'` does it")
                continue
            print(f"{name} …", flush=True)
            found += compared(
                kept(path), measured(name, CHECKS[name], Path(folder), timeout=TIMEOUT)
            )
    print(f"\n{load_line(before)}; {before['processor']}\n\n{report(found, args.tolerance)}")
    return int(any(one.is_worse(args.tolerance) for one in found))


if __name__ == "__main__":
    sys.exit(main())
