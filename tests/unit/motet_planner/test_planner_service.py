"""The planner's observer and its loop, over a bus in memory: what it sees, what it asks for, and what it tells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet_planner.actuators.actuator import ActuatorError
from motet_planner.config import DEFAULT_ROLES, PlannerConfig
from motet_planner.groups import check_local, read_groups
from motet_planner.observer import Observer
from motet_planner.service import Planner
from motet_shared.errors import ConfigError
from motet_shared.messages import Echo, ListTargets, ModelCard, ScalingTarget
from motet_shared.process.actor import Actor, operation
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

ROLES = """
[decode]
min = 0
max = 4
target = 2
window = 4
burst_window = 2
scale_down_delay = 6
cold_start = 1
"""


class Worker(Actor):
    """An instance whose load is told to it. An `Echo` lasts until `go_on`."""

    def __init__(self, bus: Bus, role: str = "decode", model: str = ""):
        self.role = role  # type: ignore[misc]
        super().__init__(None, bus)
        self.told: dict[str, float] = {}
        self.model = model
        self.go_on = asyncio.Event()

    def load(self) -> dict[str, float]:
        return self.told

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=self.model, context=1)] if self.model else []

    @operation(Echo)
    async def echo(self, call: Call, request: Echo) -> None:
        await self.go_on.wait()

    def tell(self, **load: float) -> None:
        self.told = load
        self.bus.heartbeat()


class Place:
    """An actuator that starts workers on the hub when it is told to, and notes what it was asked."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self.requested: list[tuple[str, int]] = []
        self.there: int | None = None
        self.broken = False
        self.slow: asyncio.Event | None = None

    async def count(self, name: str) -> int | None:
        return self.there

    async def scale(self, name: str, count: int) -> None:
        if self.broken:
            raise ActuatorError("the place is on fire")
        if self.slow is not None:
            await self.slow.wait()
        self.requested.append((name, count))

    async def close(self) -> None:
        """Nothing is open."""


class Stage:
    def __init__(self, hub: MemoryHub, stack: contextlib.AsyncExitStack, folder: Path):
        self.hub, self._stack, self.folder = hub, stack, folder

    async def worker(self, role: str = "decode", model: str = "") -> Worker:
        worker = Worker(await memory_bus(self.hub, role), role, model)
        await self._stack.enter_async_context(running(worker))
        await settle()
        return worker

    async def planner(self, place: Place, roles: str = ROLES, actuator: str = "dry-run") -> Planner:
        """One whose looks are the test's."""
        (self.folder / "roles.toml").write_text(roles)
        given: dict[str, Any] = {"roles": self.folder / "roles.toml", "actuator": actuator}
        config = PlannerConfig(interval=3600.0, metrics_port=-1, **given)
        planner = Planner(config, await memory_bus(self.hub, "planner"), place)
        await self._stack.enter_async_context(running(planner))
        await settle()
        return planner


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:
        yield Stage(MemoryHub(), stack, tmp_path)


async def observe(planner: Planner, now: float) -> None:
    await settle()
    await planner.observe(now)
    await planner.settled()


# ------------------------------------------------------------------------------------------------------------ observer
async def test_what_heartbeats_tell(stage: Stage) -> None:
    tokenizer, first = await stage.worker("tokenizer"), await stage.worker()
    first.tell(active=9.0, requests=100.0, queued=2.0)
    observed = Observer(first.bus.directory, read_groups(_roles(stage)))
    await settle()
    before = observed.observe(0.0)["decode"]
    assert (before.arrivals, before.running, before.waiting, before.ready) == (0, 7.0, 2.0, 1), (
        "what came is past"
    )
    first.tell(active=9.0, requests=130.0, queued=0.0)
    tokenizer.tell(waiting_for_decode=3.0, tokens=500.0)
    second = await stage.worker()
    second.tell(requests=5.0)
    warming = await memory_bus(stage.hub, "decode")
    warming.set_state("warming")
    await settle()
    found = observed.observe(2.0)["decode"]
    assert (found.arrivals, found.running, found.waiting, found.tokens) == (35, 9.0, 3.0, 500.0)
    assert (found.ready, found.starting) == (2, 1)
    await warming.close()
    await settle()
    assert observed.observe(4.0)["decode"].starting == 0


async def test_groups_of_a_role_have_their_own_models(stage: Stage) -> None:
    roles = (
        '[small]\nrole = "decode"\nmodel = "s"\n[large]\nrole = "decode"\nmodel = "l"\nmin = 0\n'
    )
    small, tokenizer = await stage.worker(model="s"), await stage.worker("tokenizer")
    observed = Observer(small.bus.directory, read_groups(_roles(stage, roles)))
    small.tell(active=4.0)
    tokenizer.tell(**{"waiting_for_decode": 6.0, "waiting_for_decode/l": 6.0})
    await settle()
    found = observed.observe(0.0)
    assert (found["small"].outstanding, found["small"].ready) == (4.0, 1)
    assert (found["large"].outstanding, found["large"].ready) == (6.0, 0)


async def test_a_cold_start_is_measured(stage: Stage) -> None:
    first = await stage.worker()
    observed = Observer(first.bus.directory, read_groups(_roles(stage)))
    assert observed.observe(0.0)["decode"].cold_start == 0.0, "it was there before"
    observed.record_request("decode", 2, 1.0)
    observed.record_request("decode", -1, 2.0)
    await stage.worker()
    await stage.worker()
    assert observed.observe(8.5)["decode"].cold_start == 7.5, (
        "the other one that came was not asked for"
    )


def _roles(stage: Stage, text: str = ROLES) -> Path:
    path = stage.folder / "roles.toml"
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------------------------------------------- loop
async def test_the_first_request_starts_an_instance_and_silence_ends_it(stage: Stage) -> None:
    place, tokenizer = Place(stage), await stage.worker("tokenizer")
    planner = await stage.planner(place)
    await observe(planner, 100.0)
    assert place.requested == [("decode", 0)]
    tokenizer.tell(waiting_for_decode=1.0)
    await observe(planner, 102.0)
    assert place.requested[-1] == ("decode", 1)
    worker = await stage.worker()
    tokenizer.tell()
    worker.tell(active=1.0, requests=1.0)
    for now in range(104, 112, 2):
        await observe(planner, float(now))
    assert place.requested[-1] == ("decode", 1)
    worker.tell(active=0.0, requests=1.0)
    for now in range(112, 126, 2):
        await observe(planner, float(now))
    assert place.requested[-1] == ("decode", 0)
    assert len(place.requested) == 3, "each change once"


async def test_load_is_followed_within_the_limits(stage: Stage) -> None:
    place, worker = Place(stage), await stage.worker()
    planner = await stage.planner(place)
    await observe(planner, 0.0)
    for number, active in enumerate((2.0, 12.0, 40.0)):
        worker.tell(active=active)
        await observe(planner, 2.0 + 2 * number)
    assert place.requested[0] == ("decode", 1)
    assert place.requested[-1] == ("decode", 4)
    counts = [count for _, count in place.requested]
    assert counts == sorted(counts)


async def test_what_is_there_but_silent_is_on_its_way(stage: Stage) -> None:
    place = Place(stage)
    place.there = 3
    planner = await stage.planner(place)
    await observe(planner, 0.0)
    assert place.requested == [("decode", 3)], "not fewer at once"


async def test_beside_a_stack_that_starts_it_waits_for_all(stage: Stage) -> None:
    place, _ = Place(stage), await stage.worker()
    planner = await stage.planner(place, ROLES.replace("min = 0", "min = 1"), actuator="local")
    await observe(planner, 100.0)
    assert place.requested == []
    await stage.worker()
    await observe(planner, 100.5)
    await observe(planner, 101.0)
    assert place.requested == [("decode", 2)], "what is there by then"


async def test_a_place_that_fails_is_asked_again(stage: Stage) -> None:
    place, worker = Place(stage), await stage.worker()
    planner = await stage.planner(place)
    place.broken = True
    worker.tell(active=8.0)
    await observe(planner, 0.0)
    await observe(planner, 2.0)
    assert (place.requested, planner.stats()["failures"]) == ([], 2)
    place.broken = False
    await observe(planner, 4.0)
    assert place.requested == [("decode", 4)]


async def test_a_slow_place_holds_up_no_look(stage: Stage) -> None:
    place, worker = Place(stage), await stage.worker()
    place.slow = asyncio.Event()
    planner = await stage.planner(place)
    for now, active in ((0.0, 2.0), (2.0, 8.0), (4.0, 8.0)):
        worker.tell(active=active)
        await settle()
        await planner.observe(now)
    assert planner.stats()["target_instances"]["decode"] > 1
    place.slow.set()
    await planner.settled()
    assert place.requested == [("decode", 1)]
    await observe(planner, 6.0)
    assert place.requested[-1] == ("decode", planner.stats()["target_instances"]["decode"])


async def test_what_is_there_is_asked_for_again_now_and_then(stage: Stage) -> None:
    place, _ = Place(stage), await stage.worker()
    planner = await stage.planner(place, ROLES.replace("min = 0", "min = 1"))
    for now in (0.0, 2.0, 30.0, 61.0, 63.0):
        await observe(planner, now)
    assert place.requested == [("decode", 1)] * 2


async def test_it_tells_what_it_is_about(stage: Stage) -> None:
    place, worker = Place(stage), await stage.worker()
    planner = await stage.planner(place)
    worker.tell(active=8.0)
    await observe(planner, 0.0)
    operator = await memory_bus(stage.hub, "operator")
    await settle()
    async with operator.open("planner", ListTargets()) as stream:
        (found,) = [item async for item in stream]
    assert isinstance(found, ScalingTarget)
    assert (found.group, found.role, found.target, found.ready) == ("decode", "decode", 4, 1)
    assert "steady load needs 4" in found.reason
    assert found.demand["steady"] == 4.0
    assert planner.load() == {"target/decode": 4.0}
    await operator.close()


async def test_a_lost_instance_is_no_longer_counted(stage: Stage) -> None:
    first, second = await stage.worker(), await stage.worker()
    observed = Observer(first.bus.directory, read_groups(_roles(stage)))
    second.tell(active=5.0, requests=5.0)
    await settle()
    assert observed.observe(0.0)["decode"].ready == 2
    die(second.bus)
    await first.bus.directory.tick(60.0)
    first.bus.heartbeat()
    await settle()
    found = observed.observe(2.0)["decode"]
    assert (found.ready, found.outstanding) == (1, 0.0)


# ------------------------------------------------------------------------------------------------------------ settings
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ""),
        ("decode = 3", "[decode]"),
        ("[decode]\nmaximum = 3", "[decode] maximum"),
        ('[decode]\nmax = "many"', "[decode]"),
        ("[decode]\nmin = 9", "[decode] min=9"),
        ("[tts]\nmin = 0", "[tts] min=0"),
        ('[a]\nrole = "decode"\n[b]\nrole = "decode"', "[b]"),
        ('[a]\nrole = "tts"\nmodel = "x"\n[tts]', "[tts]"),
        ("[decode", ""),
    ],
)
def test_wrong_roles_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "roles.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_groups(tmp_path / "roles.toml")
    assert raised.value.param == "roles"
    assert named in raised.value.message


def test_its_own_roles_can_be_followed_everywhere() -> None:
    groups = read_groups(DEFAULT_ROLES)
    assert set(groups) == {"decode", "tokenizer"}
    check_local(groups)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "[decode]\nmin = 0",
            r"\[decode\] min=0",
        ),
        (
            '[decode]\nmodel = "x"',
            r"\[decode\] model='x'",
        ),
    ],
)
def test_what_a_local_stack_cannot_do_is_refused(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "roles.toml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        check_local(read_groups(tmp_path / "roles.toml"))
