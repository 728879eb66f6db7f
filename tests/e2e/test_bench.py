"""The commands of docs/bench.md against the running stack: `motet bench` and `motet profile`."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.readme import Block, blocks
from e2e.stack import MotetStack

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("stack"),
]
SECONDS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all commands: they use each other's files."""
    return tmp_path_factory.mktemp("bench")


def run(stack: MotetStack, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Two models are served here, one in the page."""
    code = code.replace("http://127.0.0.1:8000", f"{stack.url} --model pocket-chat")
    code = code.replace(".venv/bin/motet", f"{sys.executable} -m motet_cli")
    argv = ["bash", "-euo", "pipefail", "-c", code]
    env = {**stack.env, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


@pytest.mark.parametrize("block", blocks("docs/bench.md"), ids=lambda block: f"line {block.line}")
def test_the_command_works(block: Block, request: pytest.FixtureRequest, folder: Path) -> None:
    speech = "--endpoint speech" in block.code
    stack: MotetStack = request.getfixturevalue("pocket" if speech else "stack")
    done = run(stack, folder, block.code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if "motet profile" in block.code:
        assert "20 steps of decode-" in done.stdout
        check_trace(json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes())))
    else:
        assert " failed" not in done.stdout
        told = "underruns" if speech else "plumbing"
        assert told in done.stdout, "our gateway tells where the time went"
    if "run.json" in block.code:
        check_report(json.loads((folder / "run.json").read_text()))
        assert "<svg" in (folder / "run.svg").read_text()[:1000]


def check_trace(trace: Any) -> None:
    """Every step holds operators of the model."""
    events = [event for event in trace["traceEvents"] if "dur" in event]
    steps = [event for event in events if event["name"].startswith("engine step ")]
    assert len(steps) == 20
    operators = [event for event in events if event["name"].startswith("aten::")]
    for step in steps:
        inside = [
            o
            for o in operators
            if step["ts"] <= o["ts"] and o["ts"] + o["dur"] <= step["ts"] + step["dur"]
        ]
        assert len(inside) > 100, step["name"]


def check_report(report: Any) -> None:
    summary = report["summary"]
    assert (summary["sent"], summary["completed"], summary["counted"]) == (20, 20, "usage")
    assert summary["output_tokens"] == sum(record["output_tokens"] for record in report["records"])
    assert report["config"]["tokens_per_word"] >= 1
    for record in report["records"]:
        timing = record["timing"]
        engine = timing["decode.queue"] + timing["decode.prefill"] + timing["decode.decode"]
        assert 0 < engine < timing["gateway.total"] < record["ended"] - record["sent"]


def test_the_prompts_have_the_length_that_was_asked_for(stack: MotetStack, folder: Path) -> None:
    code = ".venv/bin/motet bench http://127.0.0.1:8000 --requests 8 --input 150 --output 4 --json length.json"
    assert run(stack, folder, code).returncode == 0
    summary = json.loads((folder / "length.json").read_text())["summary"]
    assert summary["input_tokens"] / summary["completed"] == pytest.approx(150, rel=0.1)


def test_a_profile_with_everything_breaks_no_stream(stack: MotetStack, folder: Path) -> None:
    code = """
.venv/bin/motet bench http://127.0.0.1:8000 --duration 12s --output 64 --ignore-eos --json meanwhile.json > bench.txt &
.venv/bin/motet profile --url http://127.0.0.1:8000 --steps 40 --shapes --stacks --memory --output trace.json
wait
"""
    done = run(stack, folder, code)
    assert "40 steps of decode-" in done.stdout, done.stdout + done.stderr
    assert "Input Dims" in (folder / "trace.json").read_text()
    summary = json.loads((folder / "meanwhile.json").read_text())["summary"]
    assert (summary["failed"], summary["completed"] > 0) == (0, True)
    assert "lost decode-" not in stack.log()


def test_profile_refuses_by_name(stack: MotetStack, folder: Path) -> None:
    profile = f".venv/bin/motet profile --url {stack.url}"
    for more, named in (
        ("--model gpt-99", "--model: 'gpt-99'"),
        ("--instance decode-none", "--instance: 'decode-none'"),
        ("", "--model: "),
        ("--model pocket-chat --steps 100000", "steps=100000"),
        ("--model pocket-chat --seconds 0", "seconds=0"),
        ("--model pocket-chat --seconds 0.5", "no step in 0.5 s"),
    ):
        done = run(stack, folder, f"{profile} {more}")
        assert done.returncode in (1, 2)
        assert named in done.stderr, more
        assert "Traceback" not in done.stderr
