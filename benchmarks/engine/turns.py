"""Serve runs of an engine's worker process one by one, on request: the standard library only.

A worker reads a line of JSON per run, `Turn`, and answers with one that begins with `MARK`. So
several loaded engines are measured in turn, while the others are stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.engine.prompts import Prompts

MARK = "motet-turn "
_PR_SET_PDEATHSIG = 1


class Driver(Protocol):
    def run(self, prompts: Sequence[Sequence[int]], output: int) -> dict[str, Any]: ...


def _end_with_parent() -> None:
    """Have the kernel kill this process, even if it is stopped, when the one that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(driver: Driver, prompts: Prompts) -> None:
    """Run what each line of the standard input asks for, until it ends."""
    _answer({})
    for line in sys.stdin:
        turn = json.loads(line)
        given = prompts(turn["count"], turn["length"], turn["number"])
        _answer(driver.run(given, turn["output"]))


def _answer(result: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


class Turns:
    """Hold a worker process and all that it starts; they are stopped but for their turns."""

    def __init__(self, command: Sequence[str], env: dict[str, str]):
        """Start the process and wait until its engine is loaded. Raises RuntimeError."""
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._take()
        self._signal(signal.SIGSTOP)

    def run(self, *, count: int, length: int, number: int, output: int) -> dict[str, Any]:
        """Run `count` prompts of `length` tokens. Raises RuntimeError if the process ends."""
        assert self._process.stdin is not None
        turn = {"count": count, "length": length, "number": number, "output": output}
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(turn) + "\n")
            self._process.stdin.flush()
            return self._take()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process and all that it has started."""
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _take(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError(f"the worker ended with status {self._process.wait()}")

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
