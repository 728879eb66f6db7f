"""The page of conformance is made of results; a result tells a miss that was not foreseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import extended
import list_conformance
from conformance.outcome import record
from conformance.suites import NODE, PYTHON, SUITES

CLIENTS = Path(__file__).parents[2] / "conformance" / "clients"


def test_the_page_is_made_of_the_results() -> None:
    assert list_conformance.main(["--check"]) == 0


def test_every_suite_has_a_script_and_pins() -> None:
    scripts = {suite.script for suite in SUITES}
    cases = {"cases.py", "cases.mjs"}
    assert scripts == {path.name for path in CLIENTS.glob("*.*")} - cases
    assert {suite.environment for suite in SUITES} <= {*PYTHON, "node", "own"}
    assert all("==" in pin for pins in PYTHON.values() for pin in pins)
    assert all(version[0].isdigit() for version in NODE.values())


def test_a_result_and_what_was_not_foreseen(tmp_path: Path) -> None:
    cases = {"a": "", "b": "it broke", "c": "no"}
    wrong = record("x", "X", "1.0", cases, {"c": "not served", "a": "old"}, tmp_path)
    assert wrong == ["b: it broke", "a passed, or is gone"]
    found: dict[str, Any] = json.loads((tmp_path / "x.json").read_text())
    assert (found["passed"], found["applicable"]) == (1, 3)
    assert found["processor"] == extended.processor()
    found["commit"] = "0123456789abcdef+"
    table = list_conformance.table([found])
    place = f"{found['date']} | 0123456789ab+ | {found['processor']}"
    assert f"| X | 1.0 | 1 / 3 | {place} |" in table
    assert "* X, `c`: not served" in table
