"""Print one page of all targets: value, limit, and when, on what and by which command it was taken.

`python benchmarks/run.py summary --help`. The page is made of `results/targets/*.json`, one file
for each benchmark, which are part of the repository. `--take results/llm.json` puts the targets of a
run there, and writes the page to `results/summary.md`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.measures import Target, table
from benchmarks.support.paths import RESULTS_FOLDER

TARGETS_FOLDER = RESULTS_FOLDER / "targets"
PAGE = RESULTS_FOLDER / "summary.md"
_HEAD = """# All targets

Printed by `make bench ARGS=summary` from the files in [targets](targets), of which each is the last run of a
benchmark that was kept. Times are of one machine; ratios are of one run. The causes of missed targets are in the
page of the benchmark.
"""


@dataclass(frozen=True)
class Kept:
    """Hold the targets of a run, and its conditions (see `document.conditions`)."""

    name: str
    conditions: dict[str, Any]
    targets: list[Target]

    @property
    def missed(self) -> list[Target]:
        return [target for target in self.targets if not target.met]


def kept(path: Path) -> Kept:
    """Read the targets of a result.

    Raises ValueError if the file is not a result with targets.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        targets = [
            Target(one["what"], one["value"], one["limit"], one["unit"], one["most"])
            for one in document["targets"]
        ]
        return Kept(path.stem, document["conditions"], targets)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a result with targets: {error!r}") from error


def all_kept(folder: Path = TARGETS_FOLDER) -> list[Kept]:
    """Return the targets of all benchmarks by name."""
    return [kept(path) for path in sorted(folder.glob("*.json"))]


def take(path: Path, folder: Path = TARGETS_FOLDER) -> Path:
    """Keep the targets and conditions of a result, in place of the benchmark's last ones."""
    kept(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    part = {"conditions": document["conditions"], "targets": document["targets"]}
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / path.name
    written.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")
    return written


def page(runs: Sequence[Kept]) -> str:
    """Return the page in Markdown."""
    targets = [target for run in runs for target in run.targets]
    missed = sum(len(run.missed) for run in runs)
    count = f"{len(targets)} targets of {len(runs)} benchmarks, {missed} of them missed."
    parts = [_HEAD, count]
    for run in runs:
        parts.append(f"## {_title(run.name)}\n\n{_taken(run.conditions)}")
        parts.append(table(["target", "met", "limit", "measured"], map(_cells, run.targets)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _title(name: str) -> str:
    there = (RESULTS_FOLDER / f"{name}.md").exists()
    return f"[{name}]({name}.md)" if there else name


def _taken(conditions: dict[str, Any]) -> str:
    load = conditions.get("load", ["?"])[0]
    facts = [
        conditions["when"][:10],
        f"commit {conditions['commit']}" if conditions.get("commit") else "",
        conditions.get("processor", ""),
        f"{conditions['cores']} cores",
        f"load {load} before",
        f"`{conditions['command']}`" if conditions.get("command") else "",
    ]
    return ", ".join(filter(None, facts)) + "."


def _cells(target: Target) -> list[str]:
    limit = f"{'≤' if target.most else '≥'} {target.limit:,g} {target.unit}".strip()
    return [target.what, "yes" if target.met else "**no**", limit, figure(target.value)]


def figure(value: float) -> str:
    """Return a value with as many digits as a reader needs."""
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def write_page(folder: Path = TARGETS_FOLDER, output: Path = PAGE) -> None:
    output.write_text(page(all_kept(folder)), encoding="utf-8")


def main(argv: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="summary", description="One page of all targets.")
    parser.add_argument(
        "--take", nargs="+", type=Path, metavar="FILE", help="results whose targets to keep"
    )
    args = parser.parse_args(None if argv is None else list(argv))
    for path in args.take or ():
        try:
            take(path)
        except ValueError as error:
            parser.error(str(error))
    if args.take:
        write_page()
    print(page(all_kept()))


if __name__ == "__main__":
    main()
