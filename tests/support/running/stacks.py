"""Run tests that share a running stack in one process of pytest-xdist, with `--dist=loadgroup`.

In `tests/chaos` and `tests/e2e` the tests of a file share a stack. Files that share one name it:
`pytest.mark.xdist_group("chaos")`.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TESTS = Path(__file__).parents[2]
FOLDERS = (TESTS / "chaos", TESTS / "e2e")
# To build the images of the containers takes as long as many other groups together: what begins
# last would be waited for alone.
FIRST = "docker"
_NAMED = re.compile(r'xdist_group\("(\w+)"\)')


@cache
def group_of(path: Path) -> str | None:
    """Return the group of a file's tests: the one that it names, or its own; None elsewhere."""
    if not any(folder in path.parents for folder in FOLDERS):
        return None
    named = _NAMED.search(path.read_text(encoding="utf-8"))
    return path.stem if named is None else named[1]


class GroupScheduling(LoadScopeScheduling):
    """Give all tests of a group to one process.

    xdist's own scheduler finds groups in node ids, to which it cannot append them under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(TESTS.parent / nodeid.partition("::")[0]) or nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """Return the scheduler for `--dist=loadgroup`, or None for others."""
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the group `FIRST` under xdist."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: group_of(item.path) != FIRST)  # stable
