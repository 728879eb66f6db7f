"""docs/engines.md has the engines' results as `make extended PART=peers` has recorded them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def script() -> Any:
    path = ROOT / "scripts" / "render_engines.py"
    spec = importlib.util.spec_from_file_location("render_engines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current() -> None:
    assert script().main(["--check"]) == 0


def test_a_feature_that_was_not_run_says_so() -> None:
    render = script()
    document = {
        "date": "2026-01-02",
        "processor": "a CPU, 2 threads",
        "commit": "0123456789abcdef",
        "versions": {"vllm": "0.32"},
        "features": {"chat": {"vllm": "yes"}},
    }
    page = render.rendered(f"a\n{render.BEGIN}old\n{render.END}\nb\n", document)
    assert "| | vllm 0.32 | llama.cpp | motet |" in page
    assert "| chat | yes | not run | not run |" in page
    assert "on a CPU, 2 threads, commit 0123456789ab:" in page
    assert page.startswith("a\n")
    assert page.endswith(f"{render.END}\nb\n")
    assert "old" not in page
