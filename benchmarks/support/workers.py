"""Run one engine in a process of its own, which prints its results as its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.paths import ROOT

WORKER_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Define a process to run.

    task: fields of its task, in addition to those common to all.
    """

    name: str
    module: str
    python: str = sys.executable
    task: dict[str, Any] = field(default_factory=dict)

    def run(self, args: list[str], *, threads: int, output: bool = True) -> dict[str, Any]:
        """Run the process; return the JSON object of its last line if `output`.

        Raises RuntimeError with the end of its log if it fails or takes too long.
        """
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        if self.python == sys.executable:
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        command = [self.python, "-m", f"benchmarks.{self.module}", *args]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=WORKER_SECONDS, env=env
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{self.name} took more than {WORKER_SECONDS:g} s") from None
        if done.returncode != 0:
            raise RuntimeError(f"{self.name} failed:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if output else {}
        return result


def has_modules(python: str, *modules: str) -> bool:
    """Return True if an interpreter can import all of these modules."""
    check = [python, "-c", f"import {', '.join(modules)}"]
    return (
        subprocess.run(
            check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120
        ).returncode
        == 0
    )
