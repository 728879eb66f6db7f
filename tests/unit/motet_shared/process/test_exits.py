"""A process waits for the end of others, told apart by their start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from motet_shared.process.exits import identity_of, wait_for_exits

TIMEOUT = 30.0


@pytest.fixture
def others() -> Iterator[list[subprocess.Popen[bytes]]]:
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [subprocess.Popen(argv) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def identities(others: list[subprocess.Popen[bytes]]) -> list[str]:
    found = [identity_of(process.pid) for process in others]
    return [identity for identity in found if identity is not None]


def test_it_returns_when_all_have_ended(others: list[subprocess.Popen[bytes]]) -> None:
    waited = threading.Event()

    def wait(names: list[str]) -> None:
        wait_for_exits(names)
        waited.set()

    thread = threading.Thread(target=wait, args=(identities(others),), daemon=True)
    thread.start()
    first, second = others
    first.kill()
    first.wait()
    assert not waited.wait(0.2)
    second.kill()  # not waited for by its parent: its memory is free all the same
    assert waited.wait(TIMEOUT)


def test_processes_that_have_ended_and_others_of_their_number_are_not_waited_for(
    others: list[subprocess.Popen[bytes]],
) -> None:
    first, second = others
    ended = identities(others)[0]
    first.kill()
    first.wait()
    later = f"{second.pid}:1"
    began = time.monotonic()
    wait_for_exits([ended, later])
    assert time.monotonic() - began < TIMEOUT
    assert second.poll() is None


def test_an_identity_is_of_one_process() -> None:
    own = identity_of(os.getpid())
    assert own is not None
    assert own.startswith(f"{os.getpid()}:")
    assert own == identity_of(os.getpid())
    assert identity_of(1 << 30) is None
