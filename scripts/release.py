"""Move what is under *Unreleased* in CHANGELOG.md to the release of the current version.

    .venv/bin/python scripts/release.py --date 2026-11-24

The version is `motet_shared.__version__`. If its section is there already, entries are added to it.
"""

from __future__ import annotations

import argparse
import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
KINDS = ("Security", "Changed", "Added", "Deprecated", "Removed", "Fixed")
UNRELEASED = "Unreleased"

Entries = dict[str, list[str]]  # by kind, each with its line ends


def read(text: str) -> tuple[str, dict[str, Entries]]:
    """Return what precedes the first release, and entries by heading of release, newest first."""
    intro, *sections = re.split(r"(?m)^## ", text)
    releases = {}
    for section in sections:
        heading, _, body = section.partition("\n")
        releases[heading.strip()] = _entries(body)
    return intro, releases


def _entries(body: str) -> Entries:
    found: Entries = {}
    kind = ""
    for part in re.split(r"(?m)^(?=### |- )", body):
        if part.startswith("### "):
            kind = part[4:].strip()
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is no kind of entry; use one of {', '.join(KINDS)}")
        elif part.startswith("- "):
            found.setdefault(kind, []).append(part.rstrip() + "\n")
    return found


def render(intro: str, releases: dict[str, Entries]) -> str:
    """Return the changelog; kinds stand in the order of `KINDS`."""
    parts = [intro.rstrip() + "\n"]
    for heading, entries in releases.items():
        parts.append(f"\n## {heading}\n")
        for kind in KINDS:
            if entries.get(kind):
                parts.append(f"\n### {kind}\n\n{''.join(entries[kind])}")
    return "".join(parts)


def release(text: str, version: str, day: str) -> str:
    """Return the changelog with its unreleased entries under `version`."""
    intro, releases = read(text)
    waiting = releases.pop(f"[{UNRELEASED}]", {})
    current = next((name for name in releases if name.startswith(f"[{version}] ")), None)
    known = releases.pop(current) if current is not None else {}
    merged = {kind: waiting.get(kind, []) + known.get(kind, []) for kind in KINDS}
    heading = f"[{version}] - {day}"
    return render(intro, {f"[{UNRELEASED}]": {}, heading: merged, **releases})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--date", default=date.today().isoformat(), help="(default: today)")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "shared"))
    from motet_shared import __version__

    CHANGELOG.write_text(release(CHANGELOG.read_text(), __version__, args.date))
    return 0


if __name__ == "__main__":
    sys.exit(main())
