"""Run a benchmark as a process of its own, and read the targets that it wrote."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.summary import Kept, kept
from benchmarks.support.paths import ROOT


def measured(name: str, arguments: Sequence[str], folder: Path, *, timeout: float) -> Kept:
    """Run a benchmark and return its targets, leaving `NAME.json` and what it printed, `NAME.md`, in `folder`.

    timeout: seconds. Raises RuntimeError with the end of the output if it fails, or takes longer.
    """
    output, printed = folder / f"{name}.json", folder / f"{name}.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), name, *arguments]
    with printed.open("w", encoding="utf-8") as log:
        try:
            ended = subprocess.run(
                [*command, "--output", str(output)],
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{name} took longer than {timeout:g} s") from error
    if ended.returncode:
        end = printed.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"{name} ended with {ended.returncode}: {end}")
    return kept(output)
