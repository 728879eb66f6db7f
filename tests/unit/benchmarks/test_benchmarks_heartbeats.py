"""Run the benchmark of heartbeats at a tiny size, without judging speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network import heartbeats


@pytest.mark.long
@pytest.mark.timeout(120)
def test_heartbeats_are_heard_and_cost_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeats.main(["--quick", "--output", str(tmp_path / "heartbeats.json")])
    assert "| tokenizer |" in capsys.readouterr().out
    (cost,) = json.loads((tmp_path / "heartbeats.json").read_text())["findings"]["costs"]
    assert 20 < cost["heard"] < 80, "twice a second from each of twenty, and its own"
    assert 0 < cost["share"] < 1
