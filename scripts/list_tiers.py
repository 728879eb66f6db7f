"""Print which tier each test is in: `scripts/list_tiers.py [FILE]` writes a line per test; without FILE, a summary.

The summary has a line per file: its number of tests in `make test`, `make test-long` and the parts of `make extended`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def collect(path: Path) -> list[tuple[str, str]]:
    """Write the list of tiers and tests to `path` and return it. Raises CalledProcessError where collection fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "--tier=all",
        f"--tier-list={path}",
    ]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(tier, test) for tier, _, test in (line.partition(" ") for line in lines)]


def summary(tests: list[tuple[str, str]]) -> list[str]:
    """Return a table of files and how many of their tests are in each tier."""
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
    if len(sys.argv) > 1:
        print(f"{len(collect(Path(sys.argv[1]).resolve()))} tests: {sys.argv[1]}")
        return
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(summary(collect(Path(folder) / "tests"))))


if __name__ == "__main__":
    main()
