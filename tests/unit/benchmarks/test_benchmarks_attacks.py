"""Test the benchmark of attacks, and run it with a few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.operation import attacks
from benchmarks.operation.attack_client import many_scans
from benchmarks.operation.attacks import Findings


def test_ratios_of_p95_are_infinite_after_failures() -> None:
    found = Findings(
        alone=[0.1] * 18 + [0.2] * 2,
        beside={"a": [0.1] * 18 + [0.4] * 2, "b": [0.1]},
        failed={"b": 1},
    )
    assert found.ratio("a") == pytest.approx(2.0)
    assert found.ratio("b") == float("inf")


def test_the_hostile_image_repeats_its_last_scan() -> None:
    assert many_scans(50).count(b"\xff\xda") >= 50


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "attacks.json"
    attacks.main(["--quick", "--output", str(output)])
    assert "| p95 beside newlines / alone |" in capsys.readouterr().out
    document = json.loads(output.read_text())
    assert set(document["findings"]["beside"]) == set(document["plan"]["kinds"])
    assert not any(document["findings"]["failed"].values())
