"""Test the benchmark of batches, and run it with a few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.operation import batches
from benchmarks.operation.batches import Findings


def test_the_whole_run_has_enough_pairs_for_an_interval() -> None:
    assert batches.Plan().rounds >= 20


def test_ratios_are_of_p95() -> None:
    alone, beside = [0.1] * 19 + [0.2], [0.1] * 18 + [0.3, 0.4]
    found = Findings(alone=[alone, alone], beside=[beside, alone])
    assert found.ratios == pytest.approx([3.0, 1.0])
    assert found.p95 == (0.1, 0.2)


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "batches.json"
    batches.main(["--quick", "--output", str(output)])
    shown = capsys.readouterr().out
    assert "| p95 ITL beside a batch / alone |" in shown
    assert "confidence interval of their median" in shown
    document = json.loads(output.read_text())
    plan, found = document["plan"], document["findings"]
    assert [len(gaps) for gaps in (*found["alone"], *found["beside"])] == [
        plan["output"] - 1
    ] * 2 * plan["rounds"]
    assert found["lines_alone"] > 0
