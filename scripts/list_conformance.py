"""Write the table of docs/conformance.md from the results of `make extended PART=conformance`.

.venv/bin/python scripts/list_conformance.py           # writes it

.venv/bin/python scripts/list_conformance.py --check   # fails if the page is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "extended" / "results" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of suites, and the list of cases that fail with their reasons."""
    lines = [
        "| suite | version | passed / applicable | date | commit | processor |",
        "|---|---|---|---|---|---|",
    ]
    misses = []
    for one in sorted(results, key=lambda one: str(one["suite"]).lower()):
        count = f"{one['passed']} / {one['applicable']}"
        where = f"{one['date']} | {_short(one.get('commit', ''))} | {one.get('processor', '')}"
        lines.append(f"| {one['suite']} | {one['version']} | {count} | {where} |")
        for case, reason in one["misses"].items():
            misses.append(f"* {one['suite']}, `{case}`: {reason}")
    text = "\n".join(lines) + "\n"
    return text + ("\nWhat fails, and why:\n\n" + "\n".join(misses) + "\n" if misses else "")


def _short(commit: str) -> str:
    """Return the beginning of a commit, with the mark of changes that it did not have."""
    return commit[:12] + ("+" if commit.endswith("+") else "")


def written(page: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the page with the table between its marks."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + "\n" + table(results) + "\n" + END + rest.split(END)[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a script: exit status 1 if `--check` finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    results = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    page = PAGE.read_text(encoding="utf-8")
    if (made := written(page, results)) == page:
        return 0
    if args.check:
        print("docs/conformance.md is out of date; run scripts/list_conformance.py")
        return 1
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
