"""Each test runs in exactly one tier; extended runs go on where they were broken off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import extended
import gpu_parts
from support.running import tiers
from support.running.interpreted import SLOW

ROOT = Path(__file__).parents[3]
SUITE = """
import pytest

def test_quick(): pass

@pytest.mark.long
def test_long(): pass

@pytest.mark.long(after=1)
@pytest.mark.parametrize("case", range(3))
def test_cases(case): pass

@pytest.mark.extended("soak")
@pytest.mark.long
def test_soak(): pass

@pytest.mark.extended("families", after=2)
@pytest.mark.long(after=1)
@pytest.mark.parametrize("family", range(4))
def test_families(family): pass
"""


def chosen(folder: Path, tier: str, *argv: str) -> list[str]:
    """Return the tests in `folder` that `--tier` runs; none where pytest refuses to run."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    options = [
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--tier={tier}",
        *argv,
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        []
        if done.returncode == 4
        else [line.partition("::")[2] for line in done.stdout.splitlines() if "::test_" in line]
    )


def test_every_test_runs_in_one_tier(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    listed = tmp_path / "tiers"
    every = chosen(tmp_path, "all", "--tier-list", str(listed))
    lines = [line.split() for line in listed.read_text().splitlines()]
    found = {
        tier: [test.partition("::")[2] for name, test in lines if name == tier] for tier, _ in lines
    }
    assert found == {
        "test": ["test_cases[0]", "test_families[0]", "test_quick"],
        "test-long": ["test_cases[1]", "test_cases[2]", "test_families[1]", "test_long"],
        "extended-soak": ["test_soak"],
        "extended-families": ["test_families[2]", "test_families[3]"],
    }
    assert sorted(every) == sorted(test for tests in found.values() for test in tests)
    assert sorted(chosen(tmp_path, "ci")) == sorted(found["test"] + found["test-long"])
    assert sorted(chosen(tmp_path, "extended-families")) == found["extended-families"]


def test_every_collected_test_runs_in_one_tier(request: pytest.FixtureRequest) -> None:
    """Of the real tests: all that this run has collected, whatever it selects."""
    found = request.config.stash[tiers.COLLECTED]
    by_tier = Counter(test for tier in tiers.NAMES for test in tiers.select(found, tier))
    assert by_tier == Counter(test for _, test in found)
    assert set(by_tier.values()) == {1}
    parts = [f"{tiers.EXTENDED}-{part}" for part in tiers.PARTS]
    in_ci = Counter(tiers.select(found, tiers.CI))
    assert in_ci + Counter(t for part in parts for t in tiers.select(found, part)) == by_tier


def test_every_test_file_is_collected_by_the_whole_run(request: pytest.FixtureRequest) -> None:
    found = {test.partition("::")[0] for _, test in request.config.stash[tiers.COLLECTED]}
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert found <= written
    if [Path(path).resolve() for path in request.config.args] == [ROOT / "tests"]:
        assert found == written


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(
        "import pytest\n@pytest.mark.extended('x')\ndef test_one(): pass\n"
    )
    assert chosen(tmp_path, "all") == []


def test_quick_parameters_must_exist() -> None:
    first, second = tiers.mostly_long(["a", "b"], ["a"])
    assert first == "a"
    assert second == pytest.param("b", marks=pytest.mark.long)
    with pytest.raises(ValueError, match="'c'"):
        tiers.mostly_long(["a", "b"], ["c"])


def test_parts_are_the_same_everywhere() -> None:
    assert set(extended.PARTS) == set(tiers.PARTS)
    assert all(part in (ROOT / "Makefile").read_text() for part in tiers.PARTS)
    for part, steps in extended.PARTS.items():
        most = {"eyes": 5400, "families": 7200, "groups": 7200, "soak": 11400, "storm": 7200}.get(
            part, 3600
        )
        assert sum(step.seconds for step in steps) <= most, part


def test_a_part_goes_on_behind_what_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extended, "commit", lambda: "abc")
    ran, gate = tmp_path / "ran", tmp_path / "gate"
    note = f"open({str(ran)!r}, 'a').write('x')"
    first = extended.Step(name="first", argv=("-c", note), seconds=30)
    second = extended.Step(name="second", argv=("-c", f"open({str(gate)!r})"), seconds=30)
    assert not extended.run_part("storm", [first, second], results=tmp_path)
    gate.touch()
    assert extended.run_part("storm", [first, second], results=tmp_path)
    assert ran.read_text() == "x"
    document = json.loads((tmp_path / "storm.json").read_text())
    assert (document["part"], document["commit"]) == ("storm", "abc")
    assert [(step["name"], step["passed"]) for step in document["steps"]] == [
        ("first", True),
        ("second", True),
    ]
    assert document["date"]
    assert document["processor"]
    monkeypatch.setattr(extended, "commit", lambda: "def")
    assert extended.run_part("storm", [first], results=tmp_path)
    assert ran.read_text() == "xx"


# ---------------------------------------------------------------------------------------------------------- make gpu
def test_a_gpu_is_tested_in_short_parts() -> None:
    for env in ({}, {gpu_parts.DRY: "1"}):
        steps = gpu_parts.gpu_steps(env)
        assert max(step.seconds for step in steps) <= gpu_parts.LONGEST == 480
        assert sum(step.seconds for step in steps) <= gpu_parts.ALL == 1500
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)
    files = {part for step in gpu_parts.gpu_steps({}) for part in step.argv if "test_gpu_" in part}
    written = {
        str(path.relative_to(ROOT))
        for path in gpu_parts.TESTS.rglob("test_gpu_*.py")
        if path.parent.name != "tools"  # which are steps themselves, or need no GPU
    }
    assert files == written
    dry = [part for step in gpu_parts.gpu_steps({gpu_parts.DRY: "1"}) for part in step.argv]
    assert "cuda" not in dry
    assert dry.count("--quick") == 4


def test_a_part_without_its_packages_is_skipped_by_name(tmp_path: Path) -> None:
    ran = extended.Step(name="ran", argv=("-c", "print('| a | b |')"), seconds=30)
    absent = extended.Step(name="absent", argv=(), seconds=30, needs=("json", "no_such_package"))
    assert extended.run_part("gpu", [ran, absent], results=tmp_path)
    first, second = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert (first["passed"], second["passed"]) == (True, False)
    assert second["skipped"].endswith("no_such_package not installed")
    page = (tmp_path / "gpu.md").read_text()
    assert "| ran | passed |" in page
    assert f"| absent | {second['skipped']} |" in page
    assert page.endswith("## ran\n\n| a | b |\n")
    failing = extended.Step(name="failing", argv=("-c", "raise SystemExit(1)"), seconds=30)
    assert not extended.run_part("gpu", [ran, absent, failing], results=tmp_path)


def test_tracked_files_fit_on_a_machine_without_a_network() -> None:
    listed = extended.git("ls-files", "-z").split("\0")
    sizes = [(ROOT / name).stat().st_size for name in listed if (ROOT / name).is_file()]
    assert sum(sizes) < 55e6


@pytest.mark.parametrize("name", SLOW)
def test_what_the_interpreter_leaves_out_exists(name: str) -> None:
    [file] = (ROOT / "tests" / "kernels" / "gpu").rglob(name)
    text = file.read_text()
    for test in SLOW[name]:
        assert f"def {test.partition('[')[0]}(" in text
