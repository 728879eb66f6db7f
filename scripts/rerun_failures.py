"""Print the tests that failed in a CI run, and run each once more: `scripts/rerun_failures.py FILE RUNS`.

FILE: the records of tests/support/running/failures.py. RUNS: the number of runs of pytest that must have ended,
with their tests passed or failed. A test that depends on how busy the machine is fails now and then: up to `MOST`
failed tests run again, each alone. The exit status is 0 if all of them pass; their names are printed either way, last
of all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOST = 10  # failed tests; more than these are not chance
SECONDS = 300  # for one test


def main() -> int:
    """Return 0 if no test fails twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", type=int)
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.file.read_text(encoding="utf-8").splitlines()]
    failed = failed_tests(records)
    for (test, native), text in failed.items():
        print(f"\n==== failed: {test}{native and f' (MOTET_NATIVE={native})'}\n{text}")
    ended = [record["status"] for record in records if "ended" in record]
    if len(ended) != arguments.runs or not set(ended) <= {0, 1}:
        print(
            f"\n{len(ended)} of {arguments.runs} runs of pytest ended, with exit statuses {ended}: not run again"
        )
        return 1
    if not 0 < len(failed) <= MOST:
        print(f"\n{len(failed)} tests failed; up to {MOST} run again: not run again")
        print(*(f"failed: {test} {native}" for test, native in failed), sep="\n")
        return 1
    results = {key: passes(*key) for key in failed}
    for (test, native), passed in results.items():
        print(f"{'passed' if passed else 'FAILED'} when run again, alone: {test} {native}")
    return 0 if all(results.values()) else 1


def failed_tests(records: list[dict[str, Any]]) -> dict[tuple[str, str], str]:
    """Return the ends of the reports of failed tests, by node id and instruction set."""
    return {
        (record["test"], record["native"]): record["text"] for record in records if "test" in record
    }


def passes(test: str, native: str) -> bool:
    """Run a test alone, for up to `SECONDS`; return whether it passed."""
    environment = {name: value for name, value in os.environ.items() if name != "MOTET_FAILURES"}
    if native:
        environment["MOTET_NATIVE"] = native
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", test]
    try:
        return not subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS).returncode
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    sys.exit(main())
