"""How long a start took, by stage."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from motet_shared.process import starts
from motet_shared.process.starts import Start, importing, process_began


def test_what_was_done_since_the_last_mark_belongs_to_a_stage() -> None:
    times = iter([10.5, 12.0, 12.25, 13.0])
    start = Start(lambda: next(times))
    start.begin(10.0)
    for stage in ("interpreter", "imports", "weights", "imports"):
        start.mark(stage)
    assert start.stages == {"interpreter": 0.5, "imports": 2.25, "weights": 0.25}
    assert start.told() == {"start": 3.0, **start.stages}


def test_marks_count_from_the_beginning_to_the_end() -> None:
    start = Start(lambda: 5.0)
    start.mark("too early")
    start.begin(4.0)
    start.begin(1.0)  # it has begun
    start.mark("imports")
    start.end()
    start.mark("too late")
    start.begin(2.0)
    start.mark("again")
    assert start.stages == {"imports": 1.0}
    assert Start().told() == {}


def test_a_process_began_before_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < starts.now() - process_began() < 24 * 3600
    torn = tmp_path / "stat"
    torn.write_text("1 (a) b) S")
    assert starts.now() - process_began(torn) < 10
    monkeypatch.setenv("MOTET_PROCESS_BEGAN", "12.5")  # it has become another program
    assert process_began() == 12.5


def test_nothing_is_collected_while_imports_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "START", Start())
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_a_new_process_knows_how_long_it_took() -> None:
    code = "import json, time; time.sleep(0.3); from motet_shared.process.starts import START, importing\n"
    code += "with importing(): pass\nprint(json.dumps(START.told()))"
    began = time.monotonic()
    paths = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    stages = json.loads(run.stdout)
    assert 0.3 <= stages["interpreter"] <= stages["start"] <= time.monotonic() - began + 0.1
