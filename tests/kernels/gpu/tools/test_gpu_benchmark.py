"""`make extended PART=gpu`, on tensors so small that the interpreter can do it: every kernel and peer is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]
PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "gpu_kernels"]
# The modules of the kernels: those that have calls to compile.
NOUNS = {
    p.stem
    for p in (ROOT / "kernels/motet_kernels/gpu").rglob("*.py")
    if "\ndef samples(" in p.read_text()
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_benchmark_measures_every_noun(tmp_path: Path) -> None:
    output = tmp_path / "numbers.json"
    command = [*PROGRAM, "--quick", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["findings"]["milliseconds"]
    assert {name.partition(":")[0] for name in found} == NOUNS
    assert all(spent > 0 for case in found.values() for spent in case.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_measures_nothing() -> None:
    done = subprocess.run(PROGRAM, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
