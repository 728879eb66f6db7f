"""Slots of adapters whose requests leave while they are loaded, with a bank that loads nothing."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from motet_llm.adapters.adapter_cache import AdapterCache
from motet_llm.adapters.bank import ResidentAdapter
from motet_shared.errors import BadRequest

PATIENT = 20.0


class Bank:
    """Stand in for a bank whose loads wait for `go_on`, by name; those of `bad` fail."""

    nbytes = 0

    def __init__(self, slots: int):
        self.slots = slots
        self.refused: dict[str, str] = {}
        self.bad: set[str] = set()
        self.go_on: dict[str, threading.Event] = defaultdict(threading.Event)
        self.begun: list[str] = []

    def folder(self, name: str) -> None:
        """Every name is known."""

    def load(self, name: str, slot: int) -> ResidentAdapter:
        self.begun.append(name)
        assert self.go_on[name].wait(PATIENT)
        if name in self.bad:
            raise BadRequest(f"model: adapter {name!r} is damaged", param="model")
        return ResidentAdapter(name, slot, root=1)


async def hold(cache: AdapterCache, name: str) -> ResidentAdapter:
    async with cache.holding(name) as adapter:
        return adapter


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENT):
        while not condition():  # noqa: ASYNC110  # a thread changes what is waited for
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("bad", [set(), {"one"}])
async def test_a_load_without_requests_keeps_its_slot_until_it_ends(bad: set[str]) -> None:
    bank: Any = Bank(slots=1)
    bank.bad = bad
    cache = AdapterCache(bank, lambda function: function())
    leaving = asyncio.create_task(hold(cache, "one"))
    await eventually(lambda: bank.begun == ["one"])
    leaving.cancel()
    await asyncio.wait([leaving])
    waiting = asyncio.create_task(hold(cache, "two"))
    await eventually(lambda: cache.stats()["adapters_waiting"] == 1)
    assert cache.stats()["adapter_evictions"] == 0
    bank.go_on["one"].set()
    bank.go_on["two"].set()
    async with asyncio.timeout(PATIENT):
        assert (await waiting).slot == 0
    assert cache.stats()["adapter_evictions"] == len({"one"} - bad)
    cache.check_integrity()
    cache.close()


async def test_a_late_failure_leaves_the_next_load_of_its_name_alone() -> None:
    bank: Any = Bank(slots=1)
    bank.bad = {"one"}
    cache = AdapterCache(bank, lambda function: function())
    first = asyncio.create_task(hold(cache, "one"))
    await eventually(lambda: bank.begun == ["one"])
    failed = cache._by_name["one"]
    bank.go_on["one"].set()
    with pytest.raises(BadRequest):
        await first
    bank.bad = set()
    adapter = await hold(cache, "one")
    cache._loaded("one", failed, 0.0)  # as if the loop had been slow to report it
    assert await hold(cache, "one") is adapter
    cache.check_integrity()
    cache.close()
