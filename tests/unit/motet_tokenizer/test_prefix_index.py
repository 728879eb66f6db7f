"""What decode instances tell of their prefix caches, and what tokenizers know of them: over the in-memory bus."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from motet_llm.cache import cache_events as cache_updates
from motet_llm.cache.cache_events import CacheReporter
from motet_shared.messages import PROTOCOL, CacheUpdate, ListBlocks, encode
from motet_shared.process.actor import Actor, operation
from motet_shared.testing import (
    FakeClock,
    MemoryHub,
    die,
    memory_bus,
    memory_buses,
    running,
    settle,
)
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_tokenizer.prefix_index import PrefixIndex

CHAIN = list(range(100, 110))


class Worker(Actor):
    """A decode instance whose prefix cache is played by the test."""

    role = "decode"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.changes: deque[tuple[int, bool]] = deque()
        self.reporter = CacheReporter(bus, self.changes)
        bus.monitor.duties.append(self.reporter.tick)

    def load(self) -> dict[str, float]:
        return {"cache_updates": self.reporter.number}

    @operation(ListBlocks)
    async def list_blocks(self, call: Call, request: ListBlocks) -> None:
        await self.reporter.serve(call)

    def holds(self, *blocks: int, held: bool = True) -> None:
        self.changes.extend((block, held) for block in blocks)


class World:
    def __init__(self, hub: MemoryHub, clock: FakeClock, bus: Bus, worker: Worker):
        self.hub, self.clock, self.bus, self.worker = hub, clock, bus, worker
        self.index = PrefixIndex(bus)

    def known(self, worker: Worker | None = None) -> int:
        return self.index.held((worker or self.worker).bus.instance, CHAIN)


@asynccontextmanager
async def made() -> AsyncIterator[World]:
    hub, clock = MemoryHub(), FakeClock()
    buses = memory_buses("tokenizer", "decode", hub=hub, clock=clock)
    async with buses as (tokenizer, bus), running(Worker(bus)) as worker:
        yield World(hub, clock, tokenizer, worker)


async def test_what_comes_and_goes_is_known_within_a_tick() -> None:
    async with made() as world:
        await world.index.start()
        world.worker.holds(*CHAIN[:6], 7, 8)
        await world.clock.advance(0.3)
        assert world.known() == 6
        world.worker.holds(CHAIN[3], 8, held=False)
        world.worker.holds(CHAIN[6])
        await world.clock.advance(0.3)
        assert world.known() == 3, "the chain breaks where a block is gone"
        assert len(world.index) == 7
        assert world.index.held("decode-unknown", CHAIN) == 0
        assert not world.index.counts


async def test_what_comes_back_before_it_was_told_is_no_news() -> None:
    async with made() as world:
        world.worker.holds(1)
        world.worker.holds(1, held=False)
        await world.clock.advance(0.3)
        assert world.worker.reporter.number == 0


async def test_who_comes_late_asks_for_everything() -> None:
    async with made() as world:
        world.worker.holds(*CHAIN[:4])
        await world.clock.advance(0.3)
        world.worker.holds(CHAIN[4])
        await world.clock.advance(0.3)
        await world.index.start()
        assert world.known() == 0
        await world.clock.advance(2.0)  # a heartbeat tells of two news
        assert world.known() == 5
        assert world.index.counts["cache_dumps"] == 1


@pytest.mark.parametrize("others_follow", [True, False])
async def test_news_that_were_lost_are_noticed(others_follow: bool) -> None:
    async with made() as world:
        await world.index.start()
        world.worker.holds(*CHAIN[:2])
        await world.clock.advance(0.3)
        subject = subjects.cache_updates(world.worker.bus.instance)
        world.hub.lose = lambda message: message.subject == subject
        world.worker.holds(*CHAIN[2:5])
        await world.clock.advance(0.2)
        world.hub.lose = lambda message: False
        if others_follow:
            world.worker.holds(*CHAIN[5:7])
        await world.clock.advance(3.0)
        assert world.known() == (7 if others_follow else 5)
        assert world.index.counts["cache_dumps"] == 1


async def test_much_is_told_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_updates, "PIECE", 3)
    async with made() as world:
        world.worker.holds(*CHAIN)
        await world.clock.advance(0.3)
        assert world.worker.reporter.number == 4
        await world.index.start()
        await world.clock.advance(3.0)
        assert world.known() == 10


async def test_an_instance_that_is_gone_is_forgotten_and_its_successor_begins_anew() -> None:
    async with made() as world:
        await world.index.start()
        world.worker.holds(*CHAIN[:6])
        await world.clock.advance(0.3)
        die(world.worker.bus)
        await world.clock.advance(6.0)
        assert len(world.index) == 0
        bus = await memory_bus(world.hub, "decode", world.clock)
        async with running(Worker(bus)) as successor:
            successor.holds(*CHAIN[:2])
            await world.clock.advance(1.0)
            assert world.known(successor) == 2


async def test_what_is_malformed_or_forged_changes_nothing() -> None:
    async with made() as world:
        await world.index.start()
        world.worker.holds(*CHAIN[:6])
        await world.clock.advance(0.3)
        instance = world.worker.bus.instance
        subject = subjects.cache_updates(instance)
        await world.bus.control.publish(subject, b"\xc1 no message")
        await world.bus.control.publish(
            subject, encode(CacheUpdate(PROTOCOL, "decode-other", 1, [], CHAIN))
        )
        await world.bus.control.publish(
            subject, encode(CacheUpdate(PROTOCOL + 1, instance, 1, [], CHAIN))
        )
        await settle()
        assert world.known() == 6
        assert world.index.counts == {"malformed_cache_update": 1, "forged_cache_update": 2}


async def test_whatever_is_lost_or_comes_twice_the_index_ends_up_right() -> None:
    rng = random.Random(5)
    async with made() as world:
        await world.index.start()
        instance, held = world.worker.bus.instance, set[int]()
        world.hub.lose = lambda message: message.subject.endswith(".cache") and rng.random() < 0.3
        world.hub.deliver_twice = lambda message: (
            message.subject.endswith(".cache") and rng.random() < 0.3
        )
        for _ in range(60):
            block = rng.randrange(200)
            world.worker.holds(block, held=block not in held)
            held ^= {block}
            await world.clock.advance(rng.choice([0.0, 0.1, 0.3]))
        world.hub.lose = lambda message: False
        await world.clock.advance(4.0)
        assert world.index._caches[instance].blocks == held
