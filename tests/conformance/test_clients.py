"""Clients of others, unmodified, against a stack of the models that ship."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.environments import node_of, python_of
from conformance.outcome import record
from conformance.suites import SUITES, Suite
from e2e.stack import MotetStack

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended("conformance"),
    pytest.mark.timeout(1500),
]
CLIENTS = Path(__file__).parent / "clients"
SECONDS = 600


def command_of(suite: Suite) -> list[str]:
    """Return the command that runs a suite, whose environment is made if needed."""
    if suite.environment == "own":
        return [sys.executable, str(CLIENTS / suite.script)]
    if suite.environment != "node":
        return [str(python_of(suite.environment)), str(CLIENTS / suite.script)]
    node, folder = node_of()
    for script in CLIENTS.glob("*.mjs"):  # packages are found beside them
        shutil.copy(script, folder)
    return [node, str(folder / suite.script)]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_client_does_what_it_is_for(suite: Suite, stack: MotetStack, tmp_path: Path) -> None:
    env = {
        "MOTET_URL": stack.url,
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        command_of(suite),
        env=env,
        cwd=tmp_path if suite.environment != "node" else node_of()[1],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    cases = {case["name"]: case["error"] for case in found["cases"]}
    wrong = record(suite.name, suite.title, found["version"], cases, suite.misses)
    assert not wrong, done.stderr[-4000:]
