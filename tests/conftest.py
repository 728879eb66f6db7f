"""With `MOTET_REQUIRE_ALL=1` (CI) a skipped test is a failed one, so that none goes missing quietly."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support.running.tiers import pytest_addoption, pytest_collection_modifyitems  # noqa: F401  (hooks)

pytest_plugins = ["support.running.failures", "support.running.limits", "support.running.stacks"]

# Seconds depend on what else the machine does: no example has a deadline; every test has a timeout.
hypothesis.settings.register_profile("motet", deadline=None)
hypothesis.settings.load_profile("motet")

# What a machine may lack for good reason; everything else is set up by `make test`.
MAY_SKIP = ("gpu", "docker", "microphone", "namespaces")
REQUIRE_ALL = os.environ.get("MOTET_REQUIRE_ALL") == "1"

if not Path("/dev/nvidiactl").exists():
    # Without a GPU the kernels run in Triton's interpreter; that is decided when diffusers, say, imports Triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Where `motet up` keeps its state: not among that of who runs the tests.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="motet-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # threads of several processes in each other's way are slower by far

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control begins background jobs so, and children inherit it: tests that press Ctrl-C would
    # wait in vain. One that is handled is handed on as the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Exclude from garbage collection what test modules have loaded.

    To search torch, transformers and diffusers takes about a second, in every test of what collects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    excused = any(item.get_closest_marker(name) for name in MAY_SKIP) or hasattr(report, "wasxfail")
    if REQUIRE_ALL and report.skipped and not excused:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if REQUIRE_ALL and report.skipped:
        _fail(report)
    return report


def _fail(report: Any) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"skipped in spite of MOTET_REQUIRE_ALL=1 ({reason}): provide what it needs or mark it {MAY_SKIP}"
