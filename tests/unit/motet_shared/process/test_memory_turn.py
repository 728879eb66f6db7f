"""A prepared process takes memory once its gate is open and the processes named there have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from motet_shared.process.exits import identity_of
from motet_shared.process.memory_turn import Gate, MemoryTurn

TIMEOUT = 30.0
# Waits at the gate on two threads, one after a signal has come while the other waits.
WAITS = """
import signal, sys, threading
from pathlib import Path
from motet_shared.process.memory_turn import MemoryTurn, TurnAbandoned, abandon_turns

def wait():
    try:
        MemoryTurn(Path(sys.argv[1])).wait()
    except TurnAbandoned:
        print("abandoned", flush=True)

signal.signal(signal.SIGTERM, lambda *_: abandon_turns())
thread = threading.Thread(target=wait)
thread.start()
print("waits", flush=True)
while thread.is_alive():
    thread.join(0.05)
wait()
"""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def test_a_turn_comes_with_the_gate_and_the_end_of_the_processes_that_it_names(gate: Gate) -> None:
    turn = MemoryTurn(gate.path)
    come = [threading.Event() for _ in range(2)]

    def wait(event: threading.Event) -> None:
        turn.wait()
        event.set()

    for event in come:  # such as the threads that read a file
        threading.Thread(target=wait, args=(event,), daemon=True).start()
    assert not come[0].wait(0.1)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    identity = identity_of(other.pid)
    assert identity is not None
    gate.open([identity])
    assert not come[0].wait(0.1)
    other.kill()
    other.wait()
    assert all(event.wait(TIMEOUT) for event in come)
    gate.close()
    assert not gate.path.exists()


def test_a_gate_that_was_opened_before_lets_pass_and_so_does_one_that_is_gone(gate: Gate) -> None:
    gate.open([])
    MemoryTurn(gate.path).wait()
    gate.close()
    MemoryTurn(gate.path).wait()


@pytest.mark.parametrize("ended_by", ["signal", "gate"])
def test_waits_end_with_the_process_or_its_supervisor(gate: Gate, ended_by: str) -> None:
    argv = [sys.executable, "-c", WAITS, str(gate.path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "waits\n"
            if ended_by == "signal":
                process.send_signal(signal.SIGTERM)
                assert process.stdout.readline() == "abandoned\n"
                assert process.stdout.readline() == "abandoned\n"
            else:
                pending = Path(f"/proc/{process.pid}/fd")
                while not any(_links_to(path, gate.path) for path in pending.iterdir()):
                    assert process.poll() is None
                gate.close()
                assert process.stdout.readline() == "abandoned\n"
            assert process.wait(TIMEOUT) == 0
        finally:
            process.kill()


def _links_to(path: Path, target: Path) -> bool:
    try:
        return Path(os.readlink(path)) == target
    except OSError:
        return False
