"""Failed tests are recorded and run once more; what fails twice, or in numbers, fails the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SUITE = """
import pathlib
import pytest

def test_good(): pass

def test_unsteady():
    seen = pathlib.Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert "first" == "time"

@pytest.mark.parametrize("case", range(11))
def test_bad(case): assert case < 0
"""


def outer() -> dict[str, str]:
    """Return an environment without what this run of pytest tells its own processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Of the installed plugins it needs xdist alone; others take seconds to import.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    return {**kept, **plugins, "PYTHONPATH": str(ROOT / "tests")}


def record(folder: Path, *options: str) -> Path:
    """Run the suite in `folder` as CI does; return the records of its failures."""
    (folder / "conftest.py").write_text('pytest_plugins = ["support.running.failures"]\n')
    (folder / "test_suite.py").write_text(SUITE)
    file = folder / "failures"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", *options]
    environment = {**outer(), "MOTET_FAILURES": str(file)}
    subprocess.run(
        [*command, str(folder / "test_suite.py")], env=environment, cwd=folder, check=False
    )
    if file.exists():  # node ids are relative to the suite's folder
        file.write_text(file.read_text().replace('"test_suite.py', f'"{folder}/test_suite.py'))
    return file


def rerun(file: Path, runs: int = 1) -> tuple[int, str]:
    """Return the exit status and the output of `scripts/rerun_failures.py`."""
    command = [sys.executable, str(ROOT / "scripts" / "rerun_failures.py"), str(file), str(runs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outer())
    return done.returncode, done.stdout


def recorded(file: Path) -> list[str]:
    """Return the recorded tests' names."""
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    return [record["test"].rpartition("::")[2] for record in records if "test" in record]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the records of a run of the whole suite."""
    return record(tmp_path_factory.mktemp("suite"))


def only(file: Path, folder: Path, *names: str) -> Path:
    """Return a file in `folder` with the records of `file`, those of failed tests but of `names` left out."""
    lines = file.read_text().splitlines(keepends=True)
    kept = [
        line
        for line in lines
        if json.loads(line).get("test", "").rpartition("::")[2] in ("", *names)
    ]
    (folder / "failures").write_text("".join(kept))
    return folder / "failures"


def test_every_failure_is_recorded(failures: Path) -> None:
    assert sorted(recorded(failures)) == sorted(
        ["test_unsteady", *(f"test_bad[{case}]" for case in range(11))]
    )


def test_many_failures_are_not_chance(failures: Path) -> None:
    status, printed = rerun(failures)
    assert status == 1
    assert "not run again" in printed


@pytest.mark.parametrize(("runs", "status"), [(1, 0), (2, 1)], ids=["passes-again", "run-missing"])
def test_what_passes_again_passes(tmp_path: Path, failures: Path, runs: int, status: int) -> None:
    assert rerun(only(failures, tmp_path, "test_unsteady"), runs)[0] == status


def test_what_fails_twice_fails(tmp_path: Path, failures: Path) -> None:
    file = only(failures, tmp_path, "test_unsteady", "test_bad[3]")
    status, printed = rerun(file)
    assert status == 1
    assert "FAILED when run again, alone" in printed
    assert "passed when run again, alone" in printed


def test_a_run_that_could_not_collect_fails(tmp_path: Path) -> None:
    file = record(tmp_path, "--no-such-option")
    assert not file.exists() or rerun(file)[0] == 1
