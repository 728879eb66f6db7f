"""Write what engines did in `make extended PART=peers` into docs/engines.md.

scripts/render_engines.py [--check]   with --check: exit status 1 if the page is not current
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "tests" / "extended" / "results" / "engines.json"
BEGIN = (
    "<!-- runs: written by scripts/render_engines.py from tests/extended/results/engines.json -->\n"
)
END = "<!-- end of runs -->"
ENGINES = ("vllm", "llama.cpp", "motet")


def table(document: dict[str, Any]) -> str:
    """Return the table of features by engine, in Markdown."""
    versions, features = document["versions"], document["features"]
    heads = [f"{name} {versions[name]}" if name in versions else name for name in ENGINES]
    lines = [
        f"Run on {document['date']} by the tests of `make extended PART=peers`, on {document['processor']}, commit"
        f" {document['commit'][:12]}:",
        "",
    ]
    lines += ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for feature, outcomes in features.items():
        cells = [outcomes.get(name, "not run") for name in ENGINES]
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def rendered(page: str, document: dict[str, Any] | None) -> str:
    """Return the page with the table of the results; without results it says so."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    text = "No results of `make extended PART=peers` are recorded.\n"
    return head + BEGIN + (text if document is None else table(document)) + END + tail


def main(argv: Sequence[str]) -> int:
    """Run as a script."""
    document = json.loads(RESULTS.read_text()) if RESULTS.is_file() else None
    before = PAGE.read_text()
    after = rendered(before, document)
    if argv == ["--check"]:
        return int(before != after)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
