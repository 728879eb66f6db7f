"""Test the benchmark of disaggregated prefill, and run it once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network import disaggregation
from benchmarks.network.disaggregation import Run, targets


def test_targets_are_compared_with_the_baseline() -> None:
    runs = [
        Run("aggregated", ttft=[1.0, 2.0]),
        Run("apart", ttft=[0.5, 1.0]),
        Run("apart", ttft=[1.0, 3.0]),
    ]
    shm, ttft = targets({"plain copy": 10.0, "shm": 8.5, "tcp": 1.0}, runs)
    assert (shm.value, shm.met) == (pytest.approx(0.85), True)
    assert (ttft.value, ttft.met) == (pytest.approx(1.5), False)


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "disaggregation.json"
    disaggregation.main(["--quick", "--output", str(output)])
    output_text = capsys.readouterr().out
    assert "| apart |" in output_text
    assert "| shm |" in output_text
    found = json.loads(output.read_text())["findings"]
    assert [run["arrangement"] for run in found["runs"]] == ["aggregated", "apart"]
    assert all(
        run["ttft"] and all(0 < seconds < 60 for seconds in run["ttft"]) for run in found["runs"]
    )
    assert all(rate > 0 for rate in found["rates"].values())
    assert len(found["alone"]["always"]) == len(found["alone"]["never"]) == 1
    assert len(found["hidden"]) == 1
    assert 0 <= found["hidden"][0] < 1
