"""Every configuration of a kernel computes what the one that ships does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.gpu_cases import CASES_BY_MODULE, QUICK
from motet_kernels.gpu.launch import Config, choosing

MODULES = sorted(CASES_BY_MODULE)


def tensors(found: Any) -> list[torch.Tensor]:
    """Return the tensors of a result, in order."""
    if isinstance(found, torch.Tensor):
        return [found.float()]
    if isinstance(found, (tuple, list)):
        return [tensor for part in found for tensor in tensors(part)]
    return []


def picking(place: int, most: list[int]) -> Callable[..., Config]:
    """Choose the candidate at `place`, or the last one; note the highest number of candidates."""

    def choose(kernel: Any, _grid: Any, _args: Any, constants: Any) -> Config:
        candidates = list(kernel.candidates(constants))
        most[0] = max(most[0], len(candidates))
        return candidates[min(place, len(candidates) - 1)]

    return choose


@pytest.mark.parametrize("module", MODULES)
def test_configurations_agree(module: str, device: torch.device) -> None:
    most = [0]
    torch.manual_seed(0)
    for case in CASES_BY_MODULE[module](QUICK, device):
        with choosing(picking(0, most)):
            due = tensors(case.ours())
        for place in range(1, most[0]):
            with choosing(picking(place, most)):
                found = tensors(case.ours())
            torch.testing.assert_close(found, due, rtol=2e-2, atol=2e-2)
    assert most[0]


def test_tuning_runs_without_a_gpu_and_is_resumed(tmp_path: Path) -> None:
    from benchmarks.kernels import gpu_tune

    arguments = ["--quick", "--folder", str(tmp_path), "--only", "norm"]
    gpu_tune.main(arguments)
    (file,) = tmp_path.iterdir()
    before = file.read_text()
    assert "rms_norm" in before
    gpu_tune.main(arguments)
    assert file.read_text() == before
