"""Processes that are prepared wait at their gates, aside from the supervisor until they are taken."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from motet_cli.on_demand.loader import Loader, OnDemandModel
from motet_cli.on_demand.prepared import FilesState, PreparedModels, state_of
from motet_cli.on_demand.residency import Model, Residency
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.nursery import Nursery
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.messages import PROTOCOL, Heartbeat
from motet_shared.wire.bus import wanted_key
from support.running.until import until

NAMES = ("a", "b")
NO_FILES: FilesState = frozenset()
WAITS = """
import os, time
from pathlib import Path
from motet_shared.process.memory_turn import MemoryTurn
if __name__ == "__main__":
    gate = os.environ.get("MOTET_MEMORY_GATE")
    print("begins", os.getpid(), flush=True)
    MemoryTurn(gate and Path(gate)).wait()
    print("loads", flush=True)
    time.sleep(600)
"""


@pytest.fixture
async def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervisor]:
    (tmp_path / "waits_at_gate.py").write_text(WAITS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    log = Log(io.StringIO())
    nursery = Nursery({}, log.note)
    made = Supervisor(log, nursery=nursery)
    yield made
    await made.kill()
    await nursery.close()
    log.close()


def spec_of(name: str) -> ChildSpec:
    argv = (sys.executable, "-m", "waits_at_gate")
    return ChildSpec(name=name, role="decode", argv=argv, model=name, forks=True)


def lines(prepared: PreparedModels, name: str) -> list[str]:
    return [line for child, _ in prepared._models[name].processes for line in child.tail]


async def test_a_prepared_process_is_a_slot_once_it_is_taken(supervisor: Supervisor) -> None:
    prepared = PreparedModels(supervisor, limit=1)
    await prepared.add("a", [spec_of("a")], NO_FILES)
    (begins,) = await until(lambda: lines(prepared, "a"))
    assert supervisor.slots == []
    assert prepared.take("a", [], NO_FILES)
    assert not prepared.take("a", [], NO_FILES)
    (slot,) = supervisor.slots
    child = slot.child
    assert child is not None
    await until(lambda: list(child.tail) == [begins, "loads"])
    assert begins.split()[1] == str(child.pid)
    psutil.Process(child.pid).kill()  # the next one has no gate
    again = await until(lambda: None if slot.child is child else slot.child)
    assert again is not None
    await until(lambda: list(again.tail)[-1:] == ["loads"])
    await prepared.close()


async def test_a_process_that_ends_while_it_waits_is_forgotten(supervisor: Supervisor) -> None:
    prepared = PreparedModels(supervisor, limit=1)
    await prepared.add("a", [spec_of("a"), spec_of("a")], NO_FILES)
    await until(lambda: len(lines(prepared, "a")) == 2)
    pids = [child.pid for child, _ in prepared._models["a"].processes]
    psutil.Process(pids[0]).kill()
    await until(lambda: "a" not in prepared)
    await until(lambda: not any(map(psutil.pid_exists, pids)))  # all of its model have ended
    assert not prepared.take("a", [], NO_FILES)
    assert prepared.has_failed("a", lambda: NO_FILES), "it is not prepared again and again"
    assert not prepared.has_failed("a", lambda: frozenset([("config.json", 2, 1)]))
    await prepared.clear()
    assert not prepared.has_failed("a", lambda: NO_FILES)
    await prepared.add("a", [spec_of("a")], NO_FILES)
    await prepared.drop("a")
    assert not prepared.has_failed("a", lambda: NO_FILES), "that end was wanted"
    await prepared.close()


async def test_what_has_read_other_files_is_not_taken(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    prepared = PreparedModels(supervisor, limit=1)
    await prepared.add("a", [spec_of("a")], state_of(tmp_path))
    await until(lambda: lines(prepared, "a"))
    ((child, _),) = prepared._models["a"].processes
    (tmp_path / "config.json").write_text("{}")
    assert not prepared.take("a", [], state_of(tmp_path))
    await until(lambda: child.status is not None)
    assert supervisor.slots == []
    await prepared.close()


async def test_models_that_are_not_loaded_are_prepared_the_last_used_first(
    supervisor: Supervisor,
) -> None:
    models = [
        OnDemandModel(model=Model(name=name, size=1), specs=(spec_of(name),), weights=1)
        for name in NAMES
    ]
    models[1].model.used = 1.0
    prepared = PreparedModels(supervisor, limit=1)
    residency = Residency([one.model for one in models], 1)
    loader = Loader(supervisor, models, residency, print, prepared)
    loader._step([], 10.0)
    assert loader._preparing is None
    loader.begin_to_prepare()
    loader._step([], 10.0)
    await until(lambda: "b" in prepared)
    loader._step([], 20.0)
    assert len(prepared) == 1
    await until(lambda: lines(prepared, "b"))
    wanted = Heartbeat(
        v=PROTOCOL,
        role="gateway",
        instance="gateway-1",
        state="ready",
        seq=1,
        load={wanted_key("decode", "b"): 1.0},
    )
    loader._step([wanted], 30.0)
    (slot,) = supervisor.slots
    assert slot.spec.name == "b"
    assert slot.child is not None
    child = slot.child
    await until(lambda: list(child.tail)[-1:] == ["loads"])
    await loader.renew()
    assert child.status is None
    await prepared.close()
