"""docs/README.md leads to every page, and pages that say how to do something stay short."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
INDEX = "docs/README.md"
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")


def pages() -> set[str]:
    """Pages of the tree, without tables that `make extended` writes beside its results."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        name
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file() and not name.startswith("tests/extended/results/")
    }


def linked(page: str) -> set[str]:
    """Pages of the tree that a page links to; a link to a folder leads to all of its pages."""
    found = set()
    for target in LINK.findall((ROOT / page).read_text()):
        path = (ROOT / page).parent.joinpath(target).resolve()
        files = path.glob("*.md") if path.is_dir() else [path]
        found |= {str(file.relative_to(ROOT)) for file in files if file.is_relative_to(ROOT)}
    return found


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, waiting = set(), {INDEX}
    while waiting:
        reached |= waiting
        waiting = {name for page in waiting for name in linked(page)} & pages() - reached
    assert pages() - reached == set()


@pytest.mark.parametrize(
    "page", ["kernels/README.md", "benchmarks/README.md", "examples/README.md"]
)
def test_pages_of_instructions_stay_short(page: str) -> None:
    """Results have pages of their own; generated tables do not count."""
    text = re.sub(
        r"<!-- modules: .*?<!-- end of modules -->", "", (ROOT / page).read_text(), flags=re.DOTALL
    )
    assert len(text.splitlines()) <= 120
