"""End a test process that is still in a test long after the test's time limit.

pytest-timeout raises an exception in the main thread, once. A test that catches it, a loop that
cannot be closed, and the teardown of whatever has failed would still run without a limit. Here
faulthandler prints the tracebacks of all threads and ends the process, `GRACE` seconds after the
limit. Under xdist the test counts as failed, and another process runs the remaining ones.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

GRACE = 60.0  # seconds, in which a test that exceeded its limit can clean up
STDERR = pytest.StashKey[int]()  # the file descriptor, which tests do not capture


def pytest_configure(config: pytest.Config) -> None:
    """Keep a copy of stderr, before pytest captures it."""
    stderr = sys.__stderr__
    config.stash[STDERR] = os.dup(2 if stderr is None else stderr.fileno())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the copy of stderr."""
    os.close(config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Limit a test together with its fixtures."""
    begin(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Limit the teardown of a failed test; pytest and pytest-timeout end their limits here."""
    if isinstance(node, pytest.Item):
        begin(node)


def begin(item: pytest.Item) -> None:
    """Begin the limit of a test anew."""
    faulthandler.dump_traceback_later(
        seconds(item) + GRACE, exit=True, file=item.config.stash[STDERR]
    )


def seconds(item: pytest.Item) -> float:
    """Return the limit of pytest-timeout for a test."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return float(item.config.getoption("timeout") or item.config.getini("timeout") or 0.0)
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
