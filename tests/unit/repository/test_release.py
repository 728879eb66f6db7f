"""Version, changelog and release notes agree; scripts/release.py moves entries without loss."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

from motet_shared import __version__
from release import KINDS, UNRELEASED, read, release, render

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CHANGELOG.md").read_text()
HEADING = re.compile(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)")


def released() -> list[tuple[Version, date]]:
    """Versions and days, as they stand in the changelog."""
    first, *others = read(TEXT)[1]
    assert first == f"[{UNRELEASED}]"
    found = [HEADING.fullmatch(heading) for heading in others]
    return [
        (Version(match[1]), date.fromisoformat(match[2])) for match in found if match is not None
    ]


def test_every_release_has_a_version_and_a_day_and_the_newest_comes_first() -> None:
    versions = released()
    assert len(versions) == len(read(TEXT)[1]) - 1
    assert [one for one, _ in versions] == sorted({one for one, _ in versions}, reverse=True)
    assert [day for _, day in versions] == sorted((day for _, day in versions), reverse=True)


def test_the_newest_release_is_the_version_and_has_notes() -> None:
    version = str(released()[0][0])
    assert version == __version__
    notes = (ROOT / "docs" / "releases" / f"{version}.md").read_text()
    assert notes.startswith(f"# Motet {version}\n")
    assert "## Upgrading" in notes


def test_the_changelog_is_as_the_script_writes_it() -> None:
    assert render(*read(TEXT)) == TEXT


OLD = """# Changelog

Words.

## [Unreleased]

### Fixed

- One, on
  two lines.

## [1.1.0] - 2026-01-02

### Added

- Two.

### Fixed

- Three.
"""


def test_entries_go_to_the_release_that_is_there_or_to_a_new_one() -> None:
    intro, same = read(release(OLD, "1.1.0", "2026-01-03"))
    assert intro.startswith("# Changelog\n\nWords.")
    merged = {kind: entries for kind, entries in same["[1.1.0] - 2026-01-03"].items() if entries}
    assert merged == {"Added": ["- Two.\n"], "Fixed": ["- One, on\n  two lines.\n", "- Three.\n"]}
    _, new = read(release(OLD, "1.2.0", "2026-01-03"))
    assert list(new) == ["[Unreleased]", "[1.2.0] - 2026-01-03", "[1.1.0] - 2026-01-02"]
    assert new["[Unreleased]"] == {}
    assert new["[1.2.0] - 2026-01-03"] == {"Fixed": ["- One, on\n  two lines.\n"]}
    assert new["[1.1.0] - 2026-01-02"] == {"Added": ["- Two.\n"], "Fixed": ["- Three.\n"]}


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="Improved"):
        read(OLD.replace("### Added", "### Improved"))
    assert len(KINDS) == 6
