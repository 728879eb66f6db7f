"""Test that a process is told from another one that has its pid, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from motet_cli.survival.identity import Identity, identify, marked, open_pidfd, parent_of

SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEPS, env={**os.environ, "MOTET_TEST_NAME": "here"}) as process:
        yield process
        process.kill()


def test_a_process_has_one_identity(process: subprocess.Popen[bytes]) -> None:
    found = identify(process.pid)
    assert found is not None
    assert found == identify(process.pid)
    assert found.pid == process.pid
    assert parent_of(process.pid) == os.getpid()


def test_an_ended_process_has_none(process: subprocess.Popen[bytes]) -> None:
    found = identify(process.pid)
    assert found is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None, "not reaped"
    assert open_pidfd(found) is None
    process.wait()
    assert identify(process.pid) is None
    assert open_pidfd(found) is None
    assert parent_of(process.pid) == 0


def test_another_process_with_the_pid_is_not_opened(process: subprocess.Popen[bytes]) -> None:
    found = identify(process.pid)
    assert found is not None
    pidfd = open_pidfd(found)
    assert pidfd is not None
    os.close(pidfd)
    assert open_pidfd(replace(found, started=found.started - 1)) is None
    assert open_pidfd(Identity(2**22 + 1, 1)) is None  # beyond the kernel's largest


def test_processes_are_found_by_a_variable(process: subprocess.Popen[bytes]) -> None:
    assert marked("MOTET_TEST_NAME", "here") == [identify(process.pid)]
    assert marked("MOTET_TEST_NAME", "her") == []
