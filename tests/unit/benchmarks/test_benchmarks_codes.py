"""Run the benchmark of decoding with codes on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.engine import codes


@pytest.mark.parametrize("kind", codes.KINDS, ids=lambda kind: kind.name)
def test_random_weights_have_the_form_of_their_kind(kind: codes.Kind) -> None:
    weights = kind.weights(64, 512)
    assert weights.format == kind.table or weights.format == kind.own
    assert (weights.shift_NG is not None) == kind.shifted
    assert bool(weights.dense().isfinite().all())
    assert len(weights.codes_NK.unique()) == kind.levels


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_codes_are_measured_beside_our_own_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "codes.json"
    threads = torch.get_num_threads()
    try:
        options = ["--only", "_K", "--cache", str(tmp_path), "--output", str(output)]
        codes.main(["--quick", "--threads", "1", *options])
    finally:
        torch.set_num_threads(threads)
    found = json.loads(output.read_text())["findings"]
    assert [one["name"] for one in found] == [
        kind.name for kind in codes.KINDS if "_K" in kind.name
    ]
    for one in found:
        assert one["codes_bytes"] != one["own_bytes"]
        for seconds in (*one["own"].values(), *one["codes"].values()):
            assert len(seconds) == 4
            assert min(seconds) > 0
    told = capsys.readouterr().out
    assert told.count("\n| Q") == 5 + 2 * 5  # measured, and a target for each number of sequences
