"""What the loader of models on demand takes from heartbeats of gateways."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from motet_cli.on_demand.loader import Loader, OnDemandModel
from motet_cli.on_demand.prepared import PreparedModels
from motet_cli.on_demand.residency import Model, Residency
from motet_cli.on_demand.start import model_modules
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.supervisor import Supervisor
from motet_shared.messages import PROTOCOL, Heartbeat
from motet_shared.process.exits import identity_of
from motet_shared.wire.bus import keep_key, wanted_key
from support.running.until import until

TIMEOUT = 30.0
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
