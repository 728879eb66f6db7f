"""Run tests that share a running stack in one process of pytest-xdist, with `--dist=loadgroup`.

In `tests/chaos` and `tests/e2e` the tests of a file share a stack. Files that share one name it:
`pytest.mark.xdist_group("chaos")`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "chaos", TESTS / "e2e")
# To build the images of the containers takes as long as many other groups together: what begins
# last would be waited for alone.
FIRST = "docker"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of files that name no group, and begin with the group `FIRST` under xdist."""
    for item in items:
        if item.path.parent in FOLDERS and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not is_first(item))  # stable


def is_first(item: pytest.Item) -> bool:
    """Return whether a test belongs to the group that begins first."""
    marker = item.get_closest_marker("xdist_group")
    return marker is not None and FIRST in marker.args
