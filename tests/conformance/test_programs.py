"""Programs that test or measure servers, unmodified: Schemathesis, AIPerf and GuideLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.environments import python_of
from conformance.outcome import record
from e2e.stack import MotetStack
from motet_gateway.openapi.document import document
from motet_gateway.routes import ROUTES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended("conformance"),
    pytest.mark.timeout(1800),
]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "pocket-chat"
DIRECT = {"NO_PROXY": "*"}


def run(
    command: Sequence[str | Path], folder: Path, seconds: int, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program with a home of its own."""
    known = {**os.environ, **DIRECT, "HOME": str(folder), **(env or {})}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=known,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def version_of(python: Path, package: str) -> str:
    """Return the version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([str(python), "-c", code], text=True, timeout=60).strip()


# It takes a request for acceptable that fits its schema; but no schema says which models are served,
# which ids exist, or which parameters need another one.
LEFT_OUT_CHECKS = "positive_data_acceptance"
# Operations that change the machine on which the server runs.
LEFT_OUT = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# Operations that fail a check, each with the reason.
MISSES = {
    "POST /v1/images/edits": "in a form the boolean true and the text `true` of `user` are the same"
    " bytes, which are a valid text"
}


def test_schemathesis(stack: MotetStack, tmp_path: Path) -> None:
    """Its checks, over all operations: what the document allows, and what it forbids."""
    report = tmp_path / "report.json"
    command: list[str | Path] = [Path(sys.executable).parent / "schemathesis", "run"]
    command += [f"{stack.url}/openapi.json", "--checks=all"]
    command += [f"--exclude-checks={LEFT_OUT_CHECKS}", "--max-examples=10"]
    command += ["--continue-on-failure", "--generation-deterministic", "--seed=1"]
    command += ["--warnings=off", "--request-timeout=60", "--max-time=300"]
    command += ["--report=json", f"--report-json-path={report}"]
    command += [part for path in LEFT_OUT for part in ("--exclude-path", path)]
    done = run(command, tmp_path, 1200)
    found = json.loads(report.read_text())
    cases = operations_of(found)
    assert found["operations"]["tested"] == found["operations"]["selected"], done.stdout[-6000:]
    wrong = record("schemathesis", "Schemathesis", found["schemathesis_version"], cases, MISSES)
    assert not wrong, done.stdout[-6000:]
    assert found["operations"]["errored"] == 0, done.stdout[-6000:]


def operations_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Return what failed of each operation of the document, "" if nothing did."""
    cases = {
        f"{method.upper()} {path}": ""
        for path, methods in document(ROUTES)["paths"].items()
        if path not in LEFT_OUT
        for method in methods
    }
    for failure in report["failures"]:
        for operation in failure["operations"]:
            cases[operation] = str(failure["title"])
    return cases


def test_aiperf(stack: MotetStack, tmp_path: Path) -> None:
    python = python_of("aiperf")
    cases = {}
    for name, more in {
        "chat": ("--endpoint-type", "chat"),
        "chat_streamed": ("--endpoint-type", "chat", "--streaming"),
        "completions": ("--endpoint-type", "completions", "--streaming"),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        command: list[str | Path] = [python.parent / "aiperf", "profile", "--url", stack.url]
        command += ["--model", "pocket-chat", *more, "--request-count", "6", "--concurrency", "2"]
        command += ["--tokenizer", MODEL, "--synthetic-input-tokens-mean", "20"]
        command += ["--output-tokens-mean", "8", "--ui", "none", "--artifact-dir", folder]
        done = run(command, folder, 300)
        found = [
            json.loads(path.read_text()) for path in folder.rglob("profile_export_aiperf.json")
        ]
        requests = found[0].get("request_count", {}).get("avg") if found else None
        cases[name] = "" if requests == 6 else (done.stdout + done.stderr)[-300:]
    wrong = record("aiperf", "AIPerf", version_of(python, "aiperf"), cases, {})
    assert not wrong, wrong


def test_guidellm(stack: MotetStack, tmp_path: Path) -> None:
    python = python_of("guidellm")
    cases = {}
    for name, path, profile in (
        ("chat", "/v1/chat/completions", "kind=synchronous"),
        ("chat_concurrent", "/v1/chat/completions", "kind=concurrent,streams=2"),
        ("completions", "/v1/completions", "kind=synchronous"),
        ("responses", "/v1/responses", "kind=synchronous"),
    ):
        out = tmp_path / f"{name}.json"
        backend = f"kind=openai_http,target={stack.url},model=pocket-chat,request_format={path}"
        command: list[str | Path] = [python.parent / "guidellm", "run", "--backend", backend]
        command += ["--profile", profile]
        command += ["--constraint", "kind=max_requests,count=6"]
        command += ["--tokenizer", f"kind=hf_auto,model={MODEL}", "--disable-console"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"]
        command += ["--output", f"kind=json,path={out}"]
        done = run(command, tmp_path, 300)
        good = done.returncode == 0 and _answered(out)
        cases[name] = "" if good else (done.stdout + done.stderr)[-300:]
    wrong = record("guidellm", "GuideLLM", version_of(python, "guidellm"), cases, {})
    assert not wrong, wrong


def _answered(report: Path) -> bool:
    """Return True if a report has answered requests and none that failed."""
    if not report.exists():
        return False
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    return bool(requests["successful"]) and not requests["errored"]
