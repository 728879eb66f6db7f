"""No test runs without end, whatever hangs in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUITE = """
import asyncio
import pytest
from support.running import limits

limits.GRACE = 1.0

@pytest.fixture
def stuck():
    yield
    asyncio.run(asyncio.Event().wait())

@pytest.mark.timeout(5)
def test_hangs_after_its_failure(stuck):
    raise ValueError("it failed")

@pytest.mark.timeout(1)
async def test_hangs_after_its_limit():
    while True:
        try:
            await asyncio.Event().wait()
        except BaseException:
            pass

def test_is_not_lost(): pass
"""


@pytest.mark.long
def test_a_test_that_hangs_ends_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "1", "-rfEp", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), str(tmp_path)),
        ],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    # A line is "FAILED test_suite.py::NAME - cause", and the cause may name the test again.
    ended = {(line.split()[0], line.split()[1].split("::")[-1]) for line in told}
    assert ended == {
        ("FAILED", "test_hangs_after_its_failure"),
        ("FAILED", "test_hangs_after_its_limit"),
        ("PASSED", "test_is_not_lost"),
    }, done.stdout + done.stderr
    assert "most recent call first" in done.stderr  # faulthandler's
