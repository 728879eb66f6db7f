"""What a process tells of its share of the machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from motet_shared.process import vitals
from motet_shared.process.vitals import READINGS, Vitals
from motet_shared.testing import memory_buses


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "_FRESH", 0.0)


def write(proc: Path, **threads: tuple[float, float]) -> None:
    """Threads, by their ids: CPU and waiting seconds."""
    tasks = proc / "self/task"
    for old in tasks.glob("*/schedstat") if tasks.exists() else ():
        old.unlink()
        old.parent.rmdir()
    for name, (cpu, wait) in threads.items():
        folder = tasks / name.removeprefix("t")
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(f"{int(cpu * 1e9)} {int(wait * 1e9)} 7\n")


def test_what_this_machine_tells(fresh: None) -> None:
    here = Vitals(lambda: 0.25)
    before = here.read()
    assert set(before) == set(READINGS)
    assert before["timer_lag"] == 0.25
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    after = here.read()
    assert after["cpu"] - before["cpu"] >= 0.05
    assert after["loop_cpu"] > before["loop_cpu"]
    assert after["machine_cpu"] >= before["machine_cpu"] > 0
    assert after["uptime"] > before["uptime"]


def test_threads_that_end_take_nothing_back(fresh: None, tmp_path: Path) -> None:
    loop = str(threading.get_native_id())
    write(tmp_path, **{f"t{loop}": (1.0, 0.5), "t1": (2.0, 3.0)})
    here = Vitals(proc=tmp_path)
    assert here.read()["cpu_wait"] == pytest.approx(3.5)
    write(tmp_path, **{f"t{loop}": (1.5, 0.75)})
    told = here.read()
    assert told["cpu_wait"] == pytest.approx(3.75)
    assert (told["loop_cpu"], told["loop_wait"]) == (1.5, 0.75)


def test_what_the_kernel_does_not_tell_is_left_out(fresh: None, tmp_path: Path) -> None:
    assert set(Vitals(proc=tmp_path / "nothing").read()) == {"uptime", "cpu", "timer_lag"}
    (tmp_path / "stat").write_text("cpu  100 200 300 999 999 10 20 30 0 0\n")
    told = Vitals(proc=tmp_path).read()
    assert (told["machine_cpu"], told["machine_steal"]) == (630 / vitals._TICK, 30 / vitals._TICK)


async def test_every_heartbeat_carries_them() -> None:
    async with memory_buses("gateway", "tokenizer") as (gateway, _):
        (beat,) = gateway.directory.instances("tokenizer")
        assert READINGS.keys() <= beat.load.keys()
        assert beat.load["unread"] == 0.0
