"""What the loader of models on demand takes from heartbeats of gateways."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_cli.on_demand.loader import Loader, OnDemandModel
from motet_cli.on_demand.prepared import PreparedModels
from motet_cli.on_demand.residency import Model, Residency
from motet_cli.on_demand.start import model_modules
from motet_cli.supervision.backoff import BackoffPolicy
from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.messages import PROTOCOL, Heartbeat
from motet_shared.process.exits import identity_of
from motet_shared.wire.bus import keep_key, wanted_key
from support.running.until import until

TIMEOUT = 30.0
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
QUICK = BackoffPolicy(first=0.01, cap=0.05, burst=3, pause=30.0)
TELLS = (
    "import os, time; print(os.environ['MOTET_WAIT_FOR_EXIT'] or '-', flush=True); time.sleep(600)"
)


def announced(seconds: float | None) -> list[Heartbeat]:
    load = {} if seconds is None else {keep_key("decode", "a"): seconds}
    return [
        Heartbeat(v=PROTOCOL, role="gateway", instance="g", state="ready", seq=1, load=load),
    ]


def test_an_announcement_counts_once_and_the_latest_wins() -> None:
    model = Model(name="a", size=1, keep_alive=5)
    spec = ChildSpec(name="decode 1", role="decode", argv=("decode",), model="a")
    one = OnDemandModel(model=model, specs=(spec,), weights=1)
    supervisor: Any = None  # it is asked nothing here
    loader = Loader(supervisor, [one], Residency([model], 1), print, PreparedModels(supervisor, 0))
    loader.follow(announced(60.0))
    assert model.asked == 60.0
    model.enter("absent", 1.0)
    loader.follow(announced(60.0))
    assert model.asked is None
    loader.follow(announced(None))
    loader.follow(announced(-1.0))
    assert math.isinf(model.stay)


def beat(instance: str, **load: float) -> Heartbeat:
    role = instance.partition("-")[0]
    return Heartbeat(
        v=PROTOCOL, role=role, instance=instance, state="ready", seq=1, load=dict(load)
    )


async def test_a_model_is_started_to_wait_for_the_processes_of_the_one_that_leaves() -> None:
    models = [
        OnDemandModel(
            model=Model(name=name, size=1, follows=True),
            specs=(
                ChildSpec(
                    name=name,
                    role="decode",
                    argv=(sys.executable, "-c", TELLS),
                    model=name,
                    forks=True,
                ),
            ),
            weights=1,
        )
        for name in "ab"
    ]
    log = Log(io.StringIO())
    supervisor = Supervisor(log)
    residency = Residency([one.model for one in models], 1)
    loader = Loader(supervisor, models, residency, log.note, PreparedModels(supervisor, 0))

    def child(name: str) -> Any:
        slots = [slot for slot in supervisor.slots if slot.spec.model == name]
        found = slots[0].child if slots else None
        return found if found is not None and found.tail else None

    try:
        loader._step([beat("gateway-1", **{wanted_key("decode", "a"): 1.0})], 0.0)
        first = await until(lambda: child("a"))
        assert list(first.tail) == ["-"]
        loader._step([beat(first.instance)], 10.0)
        assert models[0].model.stage == "ready"
        identity = identity_of(first.pid)
        wanted = beat("gateway-1", **{wanted_key("decode", "b"): 1.0})
        loader._step([beat(first.instance), wanted], 20.0)
        assert [one.model.stage for one in models] == ["leaving", "loading"]
        second = await until(lambda: child("b"))
        assert list(second.tail) == [identity]
        await until(lambda: models[0].model.stage == "absent")
    finally:
        await supervisor.kill()
        log.close()


def decode(name: str, code: str = SLEEPS) -> ChildSpec:
    argv = (sys.executable, "-c", code)
    return ChildSpec(name=name, role="decode", argv=argv, model="a")


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    log = Log(io.StringIO())
    made = Supervisor(log, policy=QUICK)
    yield made
    await made.kill()
    log.close()


def loader_of(supervisor: Supervisor) -> tuple[Loader, Model]:
    model = Model(name="a", size=1)
    one = OnDemandModel(model=model, specs=(decode("a"),), weights=1)
    prepared = PreparedModels(supervisor, 0)
    return Loader(supervisor, [one], Residency([model], 1), lambda text: None, prepared), model


async def test_a_model_is_ready_while_one_of_its_instances_runs(supervisor: Supervisor) -> None:
    """The other is of `motet scale`, or the successor in a restart."""
    loader, model = loader_of(supervisor)
    loader._step([beat("gateway-1", **{wanted_key("decode", "a"): 1.0})], 0.0)
    (healthy,) = supervisor.slots
    child = await until(lambda: healthy.child)
    assert child is not None
    loader._step([beat(child.instance)], 10.0)
    assert model.stage == "ready"
    failing = supervisor.add(decode("a-2", "raise SystemExit(3)"))
    await until(lambda: failing.state == "failing")
    loader._step([beat(child.instance)], 20.0)
    assert (model.stage, supervisor.slots) == ("ready", [healthy, failing])
    assert await supervisor.remove(healthy)
    loader._step([], 30.0)
    assert model.stage == "leaving"
    await until(lambda: model.stage == "failed")
    assert supervisor.slots == []


async def test_a_model_that_was_being_unloaded_ends_under_the_next_supervisor(
    supervisor: Supervisor,
) -> None:
    loader, model = loader_of(supervisor)
    child = await Child.start(decode("a"), lambda line: None)
    slot = supervisor.adopt(child, leaving=True)
    loader._take_over(0.0)
    wanted = beat("gateway-1", **{wanted_key("decode", "a"): 1.0})
    loader._step([beat(child.instance, active=1.0), wanted], 1.0)
    assert (model.stage, model.active) == ("leaving", 1)
    assert await supervisor.remove(slot, 0.0)
    await until(lambda: model.stage == "absent")
    loader._step([wanted], 2.0)
    await until(lambda: supervisor.slots[0].child)
    assert model.stage == "loading"


async def test_a_model_that_was_replaced_meanwhile_is_ready_with_its_successor(
    supervisor: Supervisor,
) -> None:
    """Its predecessor ends, under the same name."""
    loader, model = loader_of(supervisor)
    old, new = [await Child.start(decode("a"), lambda line: None) for _ in range(2)]
    supervisor.adopt(old, leaving=True)
    supervisor.adopt(new)
    loader._take_over(0.0)
    assert model.stage == "loading"
    draining = msgspec.structs.replace(beat(old.instance, active=2.0), state="draining")
    loader._step([beat(new.instance, active=1.0), draining], 1.0)
    assert (model.stage, model.active) == ("ready", 3)


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"model_type": "qwen3"}, ["transformers.models.qwen3.modeling_qwen3"]),
        (
            {"model_type": "gpt-x", "text_config": {"model_type": "llama"}},
            [f"transformers.models.{name}.modeling_{name}" for name in ("gpt_x", "llama")],
        ),
        ({"model_type": "../x"}, []),
        ({}, []),
    ],
)
def test_the_code_of_a_model_is_found_by_its_config(
    config: dict[str, Any], modules: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_modules(tmp_path) == modules
