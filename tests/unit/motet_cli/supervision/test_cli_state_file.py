"""Test the state file of a supervisor whose disk is full for a while."""

from __future__ import annotations

import json
from pathlib import Path

from motet_cli.supervision.state_file import StateFile


def test_a_file_that_cannot_be_written_is_reported_once_until_it_can(tmp_path: Path) -> None:
    reports: list[str] = []
    path = tmp_path / "missing" / "state.json"
    file = StateFile(path, lambda text, level: reports.append(level))
    file.write({"pid": 1})
    file.write({"pid": 2})
    assert reports == ["warning"]
    path.parent.mkdir()
    file.write({"pid": 3})
    assert json.loads(path.read_text()) == {"pid": 3}
    path.unlink()
    path.parent.rmdir()
    file.write({"pid": 4})
    assert reports == ["warning", "warning"]
