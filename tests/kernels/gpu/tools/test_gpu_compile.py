"""Every kernel compiles for GPUs that are not here, as services call it; kernels/RESULTS.md says what it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[4] / "kernels" / "RESULTS.md"
PACKAGE = Path(__file__).parents[4] / "kernels" / "motet_kernels" / "gpu"
MODULES = {path.stem for path in PACKAGE.rglob("*.py") if "\ndef samples(" in path.read_text()}


@pytest.mark.extended("gpu")
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_ships_compiles_and_is_documented() -> None:
    compile_kernels("--documented", str(RESULTS))


@pytest.mark.extended("families")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_is_documented() -> None:
    compile_kernels("--first", "--documented", str(RESULTS))


@pytest.mark.parametrize(
    "kernels",
    [
        ("norm", "kv"),  # reductions, writes to the slots of a cache
        pytest.param(("paged_attention",), marks=pytest.mark.long),  # products
    ],
    ids=",".join,
)
def test_kernels_compile_for_one_gpu(kernels: Sequence[str]) -> None:
    compile_kernels("--first", "--only", *kernels, "--targets", "sm_90")


def compile_kernels(*arguments: str) -> None:
    """Compile in one process, because in this one Triton makes functions for its interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "motet_kernels.gpu.compile", *arguments]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_every_module_of_kernels_has_samples() -> None:
    made = re.compile(r"^\w+ = GpuKernel\(", re.MULTILINE)
    kernels = {path.stem for path in PACKAGE.rglob("*.py") if made.search(path.read_text())}
    assert kernels <= MODULES
