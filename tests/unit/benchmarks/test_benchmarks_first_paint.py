"""Run the benchmark of the page's first paint at a tiny size, without judging speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network import first_paint

pytestmark = [pytest.mark.extended("peers"), pytest.mark.timeout(300)]


def test_the_page_is_painted_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_paint.main(["--quick", "--output", str(tmp_path / "first_paint.json")])
    assert "| desktop | empty |" in capsys.readouterr().out
    found = json.loads((tmp_path / "first_paint.json").read_text())["findings"]
    assert [(one["device"], one["cache"]) for one in found] == [
        (device, cache) for device in ("desktop", "phone") for cache in ("empty", "filled")
    ]
    assert all(one["painted"][0] > 0 and one["usable"][0] > 0 for one in found)
    assert found[0]["files"] > 20
    assert found[1]["bytes"] < found[0]["bytes"]
