"""Where work goes when there are several sites, and where it may not go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from motet_shared.errors import ConfigError, NoAllowedSite, WorkerLost
from motet_shared.messages import Echo, ModelCard, Text
from motet_shared.process.actor import Actor, operation
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import FakeClock, MemoryHub, die, memory_bus, running, settle
from motet_shared.wire import sites
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.instances import pick

MODEL = "echo"


class Second(Actor):
    """Tell where it is, once it may."""

    role = "decode"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=MODEL, context=0)]

    @operation(Echo)
    async def echo(self, call: Call, request: Echo) -> None:
        await self.may_answer.wait()
        await call.send(Text(self.bus.site, []))


class First(Second):
    """Tell where it is, and where a second stage is that it calls by no name."""

    role = "tokenizer"

    @operation(Echo)
    async def echo(self, call: Call, request: Echo) -> None:
        there = await asyncio.create_task(site_of(self.bus, "decode"))
        await call.send(Text(f"{self.bus.site} {there}", []))


async def site_of(bus: Bus, role: str, instance: str | None = None) -> str:
    """Return what an instance of a role tells."""
    async with bus.open(role, Echo(text="", count=1), instance=instance) as stream:
        async for item in stream:
            assert isinstance(item, Text)
            return item.text
    raise AssertionError("nothing came")


@asynccontextmanager
async def stage(*places: str, clock: FakeClock | None = None) -> AsyncIterator[list[Bus]]:
    """Run a gateway at site a, and at each place a tokenizer and a decode worker."""
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        buses = [await memory_bus(hub, "gateway", clock, site="a")]
        stack.push_async_callback(buses[0].close)
        for site in places:
            for made in (First, Second):
                bus = await memory_bus(hub, made.role, clock, site=site)
                buses.append(bus)
                await stack.enter_async_context(running(made(bus)))
        await settle()
        yield buses


async def test_the_near_is_preferred_until_it_is_busier_by_the_margin() -> None:
    async with stage("a", "b") as (gateway, first_a, _, first_b, _):
        near, far = first_a.instance, first_b.instance
        streams = []
        for _ in range(5):
            assert await pick(gateway, "tokenizer", MODEL) == near
            streams.append(gateway.open("tokenizer", Echo(text="", count=1), instance=near))
        assert await pick(gateway, "tokenizer", MODEL) == far
        assert await pick(gateway, "tokenizer", MODEL, avoid=far) == near
        with sites.only(("a",)):
            assert await pick(gateway, "tokenizer", MODEL) == near
        for stream in streams:
            await stream.aclose()


async def test_a_limit_holds_at_every_stage_whatever_calls_it() -> None:
    async with stage("a", "b", "b") as (gateway, first_a, *_):
        with sites.only(("b",)):
            for _ in range(8):
                assert await site_of(gateway, "tokenizer") == "b b"
            with pytest.raises(NoAllowedSite, match=r"^sites: no tokenizer is ready at b,"):
                await site_of(gateway, "tokenizer", first_a.instance)
        assert await site_of(gateway, "tokenizer", first_a.instance) == "a a", "the limit is over"
        body = Echo(text="", count=1)
        trusting = gateway.caller.open(
            "tokenizer", body, instance=first_a.instance, sites=("b",)
        )  # a caller that is wrong about the site
        async with trusting:
            with pytest.raises(NoAllowedSite, match="is at a, not at b"):
                await anext(trusting.batches())


async def test_a_site_without_the_role_is_refused_at_once_and_a_lost_one_after_the_patience() -> (
    None
):
    clock = FakeClock()
    async with stage("a", "b", clock=clock) as (gateway, _, _, first_b, _):
        with sites.only(("c",)), pytest.raises(NoAllowedSite, match="'echo' is ready at c"):
            await pick(gateway, "tokenizer", MODEL, patience=60.0)
        die(first_b)
        await clock.advance(4)
        with sites.only(("b",)), pytest.raises(NoAllowedSite):
            async with asyncio.timeout(1):
                await pick(gateway, "tokenizer", MODEL, patience=0.1)
        await clock.advance(60)
        with sites.only(("b",)), pytest.raises(NoAllowedSite):
            await pick(gateway, "tokenizer", MODEL, patience=60.0)


async def test_a_dark_site_is_left_by_all_streams_at_once_and_returns() -> None:
    clock = FakeClock()
    async with stage("a", "b", "b", clock=clock) as (gateway, first_a, _, *at_b):
        there = at_b[0].instance
        beating = [(bus, bus.monitor.duties) for bus in at_b]
        for bus in at_b:  # no heartbeat, and no answer
            bus.calls.state = "ready"
            bus.monitor.duties = []
        waiting = gateway.open("tokenizer", Echo(text="", count=1), instance=there)
        directory = gateway.directory
        await clock.advance(1.0)
        assert len(directory.ready("tokenizer")) == 3, "two missed heartbeats are no loss"
        await clock.advance(0.5)
        assert [beat.instance for beat in directory.ready("tokenizer")] == [first_a.instance]
        with pytest.raises(WorkerLost, match="its site b is dark"):
            async for _ in waiting.batches():
                pass
        await waiting.aclose()
        for bus, duties in beating:
            bus.monitor.duties = duties
        await clock.advance(1.5)
        assert len(directory.ready("tokenizer")) == 3


async def test_a_process_that_hears_nothing_at_all_leaves_no_site() -> None:
    clock = FakeClock()
    async with stage("a", "b", clock=clock) as (gateway, *others):
        dark: list[str] = []
        gateway.directory.on_dark = lambda site, instances: dark.append(site)
        for bus in (gateway, *others):
            bus.monitor.duties = [duty for duty in bus.monitor.duties if "beat" not in str(duty)]
        await clock.advance(2.0)
        assert not dark


def test_names_of_sites() -> None:
    assert ProcessConfig(site="eu-1").site == "eu-1"
    with pytest.raises(ConfigError, match="'EU 1' is no name of a site; use a-z"):
        ProcessConfig(site="EU 1")
