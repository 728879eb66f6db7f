"""`motet doctor` names what is wrong: eight stacks that are made ill, and one that is not.

Every one is a stack of real processes under real load, and is asked through the command. What makes it ill is a setting
or a client, never a number. Where the engine is not the point, it is one that takes a fixed time per token.

The machine of a test may be busy with something else, and then it is right to say so: `cpu_neighbour` and `cpu_full`
may come with any other finding, except that a healthy stack on a quiet machine has none at all.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from benchmarks.stack import fake_engine
from e2e.clinic import Clinic, busy_loop, pin
from motet_shared.testing import NatsServer
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.fork_server import ForkServer

pytestmark = [
    pytest.mark.extended("storm"),  # a machine with other work limits stacks, too
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

MODEL = fake_engine.MODEL
MACHINE = {"cpu_neighbour", "cpu_full"}
PREFIX = "There is a red circle. " * 80  # tokens are bytes


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights."""
    return tiny_checkpoint(
        "llama", tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=8192
    )


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a tokenizer needs beside the engine without a model."""
    return fake_engine.save_checkpoint(tmp_path_factory.mktemp("models") / "words")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nurseries() -> AsyncIterator[tuple[ForkServer, ForkServer]]:
    """Of what stands before the engines, without torch, and of engines."""
    light = ForkServer("motet_gateway.service", "motet_tokenizer.service", lacking=("torch",))
    async with light, ForkServer("motet_llm.service", "benchmarks.stack.fake_engine") as heavy:
        yield light, heavy


@pytest_asyncio.fixture(loop_scope="module")
async def clinic(nurseries: tuple[ForkServer, ForkServer]) -> AsyncIterator[Clinic]:
    async with NatsServer() as nats, Clinic(nats, *nurseries, MODEL) as clinic:
        yield clinic


def only(found: dict[str, dict[str, Any]], name: str, layer: str) -> dict[str, Any]:
    """The finding that is due; no other one but about the machine."""
    assert name in found, found
    assert set(found) - MACHINE <= {name}, found
    assert found[name]["layer"] == layer
    return found[name]


async def test_a_healthy_stack_has_nothing(clinic: Clinic, tiny: Path) -> None:
    await clinic.front(tiny)
    await clinic.decode(tiny)
    await clinic.ready(decode=1)

    async def sometimes() -> None:
        while True:
            await clinic.ask(PREFIX + "What is it?", 8)
            await asyncio.sleep(0.2)

    before = psutil.cpu_times_percent(None)
    async with clinic.crowd(sometimes(), sometimes()):
        found = await clinic.diagnosis()
    assert before is not None
    assert set(found) <= MACHINE, found
    idle = psutil.cpu_times_percent(None).idle / 100 * (os.cpu_count() or 1)
    assert not found or idle < 1.0, f"{idle:.2f} cores were free: {found}"


async def test_prompts_that_hold_up_replies(clinic: Clinic, tiny: Path) -> None:
    await clinic.front(tiny)
    await clinic.decode(
        tiny, "--decode-slowdown", "0", "--token-budget", "8192", "--num-blocks", "4096"
    )
    await clinic.ready(decode=1)

    async def long_prompts() -> None:
        number = 0
        while True:
            number += 1
            await clinic.ask(f"{number} " + PREFIX)

    async with clinic.crowd(
        clinic.stream("Count.", 8000), clinic.stream("Count on.", 8000), long_prompts()
    ):
        found = await clinic.finds("prefill_blocks_decode")
    finding = only(found, "prefill_blocks_decode", "L3")
    assert finding["numbers"]["prefilled_tokens_per_step"] > 1000
    assert "--decode-slowdown 1.8" in finding["knob"]


async def test_a_cache_that_is_too_small(clinic: Clinic, tiny: Path) -> None:
    await clinic.front(tiny)
    await clinic.decode(tiny, "--num-blocks", "160")  # 2560 tokens
    await clinic.ready(decode=1)

    async def conversations() -> None:
        while True:
            for who in "ABCD":
                await clinic.ask(who + PREFIX, 2)  # 1900 tokens
                await asyncio.sleep(0.02)

    async with clinic.crowd(conversations()):
        found = await clinic.finds("cache_too_small")
    finding = only(found, "cache_too_small", "L2")
    assert finding["numbers"]["recomputed_share"] > 0.5
    assert finding["numbers"]["evictions"] > 0
    assert "--kv-memory" in finding["knob"]


async def test_one_instance_that_has_it_all(clinic: Clinic, words: Path) -> None:
    await clinic.front(words)
    for _ in range(2):
        await clinic.fake("--rate", "50", "--prefill", "500", "--blocks", "100000")
    await clinic.ready(decode=2)
    begun = [asyncio.Event() for _ in range(12)]

    async def session(number: int) -> None:
        if number:
            await begun[number - 1].wait()
        if number == 1:
            await asyncio.sleep(2)  # until all know what is cached where
        await clinic.stream(f"{PREFIX} I am {number}.", 1 << 20, begun[number])

    async with clinic.crowd(*(session(number) for number in range(len(begun)))):
        await asyncio.wait_for(begun[-1].wait(), 60)
        found = await clinic.finds("hot_instance")
    finding = only(found, "hot_instance", "L4")
    assert finding["numbers"]["active"] >= 8
    assert "MOTET_ROUTING=load" in finding["knob"]


async def test_a_gateway_without_time(clinic: Clinic, words: Path) -> None:
    await clinic.front(words)
    await clinic.fake("--rate", "10")
    await clinic.ready(decode=1)

    async def page() -> None:
        reader, writer = await clinic.connect()
        try:
            while True:
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                size = re.search(rb"content-length: (\d+)", head)
                assert size is not None, head
                await reader.readexactly(int(size[1]))
        finally:
            writer.close()

    async with clinic.crowd(clinic.stream("Count.", 1 << 20), *(page() for _ in range(8))):
        found = await clinic.finds("gateway_bound")
    finding = only(found, "gateway_bound", "L5")
    assert finding["numbers"]["loop"] >= 0.85
    assert "motet scale gateway=2" in finding["knob"]


async def test_clients_that_do_not_read(clinic: Clinic, words: Path) -> None:
    await clinic.front(words)
    await clinic.fake()
    await clinic.ready(decode=1)
    for _ in range(3):
        clinic.open_and_forget("Count.", 1 << 20)
    await asyncio.sleep(3)  # until the buffers on the way are full
    finding = only(await clinic.finds("slow_client"), "slow_client", "L6")
    assert finding["numbers"]["unread_replies"] >= 0.5
    assert finding["numbers"]["unread_at_decode"] > 0, "it waits for them too"


async def test_a_tokenizer_without_time(clinic: Clinic, words: Path) -> None:
    await clinic.front(words)
    await clinic.fake("--rate", "500")
    await clinic.ready(decode=1)

    async def short_answers(number: int) -> None:
        while True:
            await clinic.ask(f"{number} " + PREFIX * 2)

    async with clinic.crowd(*(short_answers(number) for number in range(8))):
        found = await clinic.finds("tokenizer_bound")
    finding = only(found, "tokenizer_bound", "L5")
    assert "motet scale tokenizer=2" in finding["knob"]


async def test_too_few_engines(clinic: Clinic, tiny: Path) -> None:
    await clinic.front(tiny)
    for _ in range(2):
        await clinic.decode(tiny, "--max-running", "1")
    await clinic.ready(decode=2)

    async def answers(number: int) -> None:
        while True:
            await clinic.ask(f"I am {number}.", 64)

    async with clinic.crowd(*(answers(number) for number in range(12))):
        found = await clinic.finds("too_few_decode")
    finding = only(found, "too_few_decode", "L4")
    assert finding["numbers"]["queued"] > 2
    assert finding["numbers"]["instances"] == 2
    assert "motet scale decode=3" in finding["knob"]


async def test_a_neighbour_that_takes_the_core(clinic: Clinic, tiny: Path) -> None:
    await clinic.front(tiny)
    worker = await clinic.decode(tiny)
    await clinic.ready(decode=1)
    core = max(os.sched_getaffinity(0))
    pin(worker, core)
    with busy_loop(core):
        async with clinic.crowd(clinic.stream("Count.", 8000), clinic.stream("Count on.", 8000)):
            found = await clinic.finds("cpu_neighbour")
    finding = only(found, "cpu_neighbour", "L0")
    assert any(name.startswith("decode-") for name in finding["where"])
    assert finding["numbers"]["waiting_share"] >= 0.3
