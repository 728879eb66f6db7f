"""Record failed tests in the file that `MOTET_FAILURES` names, for `scripts/rerun_failures.py`.

The file has a JSON object per line: `{"session": ID}` when a run of pytest begins, `{"test": NODE ID,
"native": MOTET_NATIVE, "text": END OF ITS REPORT}` for each failed test, and `{"ended": ID, "status": EXIT STATUS}`.
"""

from __future__ import annotations

import json
import os

import pytest

# Taken out of the environment: tests that run pytest have failures of their own.
FILE = os.environ.pop("MOTET_FAILURES", "")
LINES = 25  # of a failed test's report

if FILE and "PYTEST_XDIST_WORKER" not in os.environ:

    def pytest_sessionstart() -> None:
        """Record that a run begins."""
        _write({"session": os.getpid()})

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """Record a failed test; its set-up and its teardown count as the test."""
        if report.failed:
            text = "\n".join(report.longreprtext.splitlines()[-LINES:])
            native = os.environ.get("MOTET_NATIVE", "")
            _write({"test": report.nodeid, "native": native, "text": text})

    def pytest_sessionfinish(exitstatus: int) -> None:
        """Record how a run ended."""
        _write({"ended": os.getpid(), "status": int(exitstatus)})


def _write(record: dict[str, object]) -> None:
    with open(FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
