"""Print the tier of each test: `scripts/list_tiers.py [--summary] [PATH ...]`.

A line has a tier (`test`, `test-long` or `extended-PART`) and a test. With `--summary`, a line has
the numbers of tests of a file. PATH: the tests to list, as for pytest (all).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def collect(paths: list[str]) -> list[tuple[str, str]]:
    """Return tier and id of all tests below `paths`. Raises CalledProcessError if pytest fails."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "tests"
        options = ("--collect-only", "-q", "--tier=all", f"--tier-list={listed}")
        command = [sys.executable, "-m", "pytest", *options, *paths]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        lines = listed.read_text(encoding="utf-8").splitlines()
    return [(tier, test) for tier, _, test in (line.partition(" ") for line in lines)]


def summary(tests: list[tuple[str, str]]) -> list[str]:
    """Return a Markdown table of the number of tests by file and tier."""
    tiers = sorted(
        {tier for tier, _ in tests}, key=lambda tier: (tier != "test", tier != "test-long", tier)
    )
    counts = Counter((test.partition("::")[0], tier) for tier, test in tests)
    files = sorted({file for file, _ in counts})
    rows = [f"| file | {' | '.join(tiers)} |", f"|---|{'---:|' * len(tiers)}"]
    rows += [
        f"| {file} | {' | '.join(str(counts[file, tier] or '') for tier in tiers)} |"
        for file in files
    ]
    totals = Counter(tier for tier, _ in tests)
    return [*rows, f"| all | {' | '.join(str(totals[tier]) for tier in tiers)} |"]


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--summary", action="store_true", help="print the number of tests by file and tier"
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="tests to list (all)")
    args = parser.parse_args()
    tests = collect(args.paths)
    lines = summary(tests) if args.summary else [f"{tier} {test}" for tier, test in tests]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
