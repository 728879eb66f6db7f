"""Tests that share a stack run in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.running.stacks import FOLDERS, TESTS, group_of

CONFTEST = """
from pathlib import Path
from support.running import stacks

stacks.TESTS, stacks.FOLDERS = Path(__file__).parent / "tests", (Path(__file__).parent / "tests",)
pytest_plugins = ["support.running.stacks"]
"""
TEST = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    with open({log!r}, "a") as log:
        log.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_files_that_name_a_group_share_it() -> None:
    groups = {path: group_of(path) for folder in FOLDERS for path in folder.glob("test_*.py")}
    assert all(groups.values())
    assert groups[TESTS / "e2e" / "test_compose.py"] == groups[TESTS / "e2e" / "test_swarm.py"]
    assert groups[TESTS / "chaos" / "test_kill.py"] == "chaos"
    assert groups[TESTS / "e2e" / "test_wheel.py"] == "test_wheel"
    assert group_of(TESTS / "kernels" / "test_native.py") is None


def test_a_group_stays_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abc":
        code = TEST.format(log=str(tmp_path / f"{name}.log"))
        (tmp_path / "tests" / f"test_{name}.py").write_text(code)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--dist=loadgroup")
    options = ("--no-loadscope-reorder", "-p", "no:cacheprovider", "-c", "/dev/null")
    done = subprocess.run(
        (*command, *options, "--rootdir", str(tmp_path), "tests"),
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(TESTS),
            "PATH": "/usr/bin:/bin",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workers = [set((tmp_path / f"{name}.log").read_text().split()) for name in "abc"]
    assert [len(one) for one in workers] == [1, 1, 1]
    assert len(set.union(*workers)) == 2
