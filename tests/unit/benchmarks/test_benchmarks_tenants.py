"""Test the benchmark of tenants, and run it with a few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.operation import tenants
from benchmarks.operation.tenants import Findings


def test_ratios_are_of_p95() -> None:
    alone, beside = [0.1] * 19 + [0.2], [0.1] * 18 + [0.3, 0.4]
    found = Findings(alone=[alone, alone], beside=[beside, alone])
    assert found.ratios == pytest.approx([3.0, 1.0])
    assert found.p95 == (0.1, 0.2)


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "tenants.json"
    tenants.main(["--quick", "--threads", "1", "--output", str(output)])
    assert "| p95 TTFT beside a flood / alone |" in capsys.readouterr().out
    document = json.loads(output.read_text())
    plan, found = document["plan"], document["findings"]
    assert [len(times) for times in (*found["alone"], *found["beside"])] == [
        plan["requests"]
    ] * 2 * plan["rounds"]
    assert all(
        0 < seconds < 60 for times in (*found["alone"], *found["beside"]) for seconds in times
    )
    assert len(found["flooded"]) == plan["rounds"]
