"""Run the benchmark of formats on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import formats


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_format_is_measured_beside_the_exact_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "formats.json"
    cache = tmp_path / "cache"
    cache.mkdir()
    formats.main(
        [
            "--quick",
            "--threads",
            "1",
            "--limit",
            "0",
            "--cache",
            str(cache),
            "--output",
            str(output),
        ]
    )
    found = {finding["name"]: finding for finding in json.loads(output.read_text())["findings"]}
    assert list(found) == [form.name for form in formats.FORMATS]
    assert all(
        rate > 0 for finding in found.values() for rate in [*finding["rates"], *finding["exact"]]
    )
    exact = found["exact"]
    for name, finding in found.items():
        if name.startswith(("weights", "GGUF")):
            assert finding["weight_bytes"] < exact["weight_bytes"], name
        if "KV" in name:
            assert finding["kv_bytes"] < exact["kv_bytes"], name
    assert capsys.readouterr().out.count("\n| KV ") == 3
