"""One engine in a process of its own: started once per round, it prints what it measured as its last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKER_SECONDS = 1800.0


def run_worker(
    name: str, script: str, args: list[str], *, threads: int, python: str = sys.executable, output: bool = True
) -> dict[str, Any]:
    """The JSON object of the worker's last line, if `output`. RuntimeError with the end of its log if it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE)}
    if python == sys.executable:
        env["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    try:
        done = subprocess.run(
            [python, str(HERE / script), *args], capture_output=True, text=True, timeout=WORKER_SECONDS, env=env
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{name} took more than {WORKER_SECONDS:g} s") from None
    if done.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if output else {}
    return result


def has_modules(python: str, *modules: str) -> bool:
    """Whether an interpreter can import them all."""
    check = [python, "-c", f"import {', '.join(modules)}"]
    return subprocess.run(check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120).returncode == 0
