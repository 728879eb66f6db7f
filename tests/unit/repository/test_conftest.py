"""CI must not lose tests quietly: with MOTET_REQUIRE_ALL=1 a skip is a failure, unless it is excused by a marker."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = """
import pytest

def test_skips(): pytest.skip("no reason")

@pytest.mark.skip(reason="by marker")
def test_marked(): pass

@pytest.mark.gpu
def test_excused(): pytest.skip("no accelerator")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure(): assert False
"""


@pytest.mark.parametrize(
    ("required", "summary"),
    [("0", "3 skipped, 1 xfailed"), ("1", "1 failed, 1 skipped, 1 xfailed, 1 error")],
)
def test_skips_fail_where_all_tests_are_required(
    tmp_path: Path, required: str, summary: str
) -> None:
    assert summary in run_pytest(tmp_path, SUITE, required)


@pytest.mark.parametrize(("required", "summary"), [("0", "1 skipped"), ("1", "1 error")])
def test_skipped_modules_fail_too(tmp_path: Path, required: str, summary: str) -> None:
    suite = "import pytest\npytest.importorskip('no_such_module')\ndef test_one(): pass\n"
    assert summary in run_pytest(tmp_path, suite, required)


def test_children_begin_with_default_signals_in_a_background_job_too(tmp_path: Path) -> None:
    child = "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
    suite = f"import subprocess, sys\ndef test_one(): subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
    assert "1 passed" in run_pytest(
        tmp_path, suite, "0", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    )


def test_what_was_loaded_is_not_searched_for_garbage() -> None:
    assert gc.get_freeze_count() > 10_000


def run_pytest(folder: Path, suite: str, required: str, first: str = "pass") -> str:
    root = Path(__file__).parents[3]
    (folder / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (folder / "test_suite.py").write_text(suite)
    command = [
        sys.executable,
        "-c",
        f"import sys, pytest; {first}; sys.exit(pytest.main(sys.argv[1:]))",
        "-p",
        "no:cacheprovider",
        "-c",
        str(root / "pyproject.toml"),
        str(folder),
    ]
    environment = os.environ | {"MOTET_REQUIRE_ALL": required}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False
    ).stdout
