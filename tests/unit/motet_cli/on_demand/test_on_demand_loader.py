"""What the loader of models on demand takes from heartbeats of gateways."""

from __future__ import annotations

import math
from typing import Any

from motet_cli.on_demand.loader import Loader, OnDemandModel
from motet_cli.on_demand.residency import Model, Residency
from motet_cli.supervision.child import ChildSpec
from motet_shared.messages import PROTOCOL, Heartbeat
from motet_shared.wire.bus import keep_key


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
    loader = Loader(supervisor, [one], Residency([model], 1), print)
    loader.follow(announced(60.0))
    assert model.asked == 60.0
    model.enter("absent", 1.0)
    loader.follow(announced(60.0))
    assert model.asked is None
    loader.follow(announced(None))
    loader.follow(announced(-1.0))
    assert math.isinf(model.stay)
