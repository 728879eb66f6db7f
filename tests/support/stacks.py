"""Run tests that share a running stack in one process of pytest-xdist, with `--dist=loadgroup`.

In `tests/chaos` and `tests/e2e` the tests of a file share a stack. Files that share one name it:
`pytest.mark.xdist_group("chaos")`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "chaos", TESTS / "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of files that name no group."""
    for item in items:
        if item.path.parent in FOLDERS and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
