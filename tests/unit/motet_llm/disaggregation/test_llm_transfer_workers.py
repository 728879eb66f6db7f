"""A decode and a prefill worker on the in-memory bus, with real blobs: prompts, deaths, cancels, lies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_llm.config import DecodeConfig
from motet_llm.disaggregation.placement import Delay
from motet_llm.engine.outputs import Emit, StepOutput
from motet_llm.service import Decode
from motet_llm.serving import prefill_service
from motet_llm.serving import prefill_service as prefill
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest
from motet_shared.messages import BlobRef, Generate, KvChunk, Prefill, Sampling, Tokens
from motet_shared.testing import die, memory_buses, running
from motet_shared.wire import sites
from motet_shared.wire.bus import HOST, Bus
from motet_tokenizer.router import Router
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.refusals import refuses

BLOCKS = 128
PROMPT = [(7 * i * i + i) % 250 for i in range(400)]
FREED_WITHIN = 10.0  # seconds: two are due, and machines that run tests are slow
PATIENT = 15.0

Reply = list[
    tuple[int, float]
]  # tokens and their log-probabilities, which tell more of what was read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker") / "tiny"
    path.mkdir()
    return tiny_checkpoint("llama", path, hidden_size=32, head_dim=8)


@dataclass
class World:
    tokenizer: Bus
    decode: Decode
    prefill: prefill_service.Prefill

    async def tokens(self, **fields: Any) -> tuple[Reply, dict[str, float]]:
        """And seconds by stage."""
        found: Reply = []
        async with self.open(**fields) as stream:
            async for body in stream:
                assert isinstance(body, Tokens)
                found += [(entry.id, entry.logprob) for entry in body.logprobs or ()]
        assert stream.end is not None
        return found, stream.end.timing

    def open(self, **fields: Any) -> Any:
        sampling = Sampling(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        request = Generate(model="tiny", prompt=PROMPT, sampling=sampling)
        return self.tokenizer.open("decode", msgspec.structs.replace(request, **fields))

    def slow_down(self, seconds: float = 0.05) -> None:
        """Each chunk of a prompt takes a while, elsewhere."""
        engine = self.prefill.thread.engine
        step = engine.step

        def slowly(emit: Emit | None = None) -> list[StepOutput]:
            time.sleep(seconds)
            return step(emit)

        engine.step = slowly  # type: ignore[method-assign]

    async def midway(self) -> None:
        """Some of a prompt has come, and not all of it."""
        await eventually(lambda: self.decode.stats()["kv_parts_received"] >= 2)
        assert self.decode.stats()["kv_transfers"] == 1
        assert self.prefill.stats()["running"] == 1

    def nothing_is_held(self) -> bool:
        return self.decode_is_free() and self.prefill_is_free()

    def decode_is_free(self) -> bool:
        stats = self.decode.stats()
        return bool(
            stats["blocks_free"] == BLOCKS and not stats["kv_transfers"] and not stats["running"]
        )

    def prefill_is_free(self) -> bool:
        stats = self.prefill.stats()
        return bool(stats["blocks_free"] == BLOCKS and not stats["blobs"] and not stats["running"])


@asynccontextmanager
async def stage(
    folder: Path, there: dict[str, Any] | None = None, **here: Any
) -> AsyncIterator[World]:
    common: dict[str, Any] = {
        "model": str(folder),
        "num_blocks": BLOCKS,
        "threads": 1,
        "metrics_port": -1,
    }
    common |= {"max_running": 8, "deterministic": True}
    config = DecodeConfig(**common | {"remote_prefill": "always", "block_size": 8} | here)
    other = DecodeConfig(
        **common
        | {"role": "prefill", "token_budget": 16, "transfer_memory": 1 << 20}
        | (there or {})
    )
    async with memory_buses("tokenizer", "decode", "prefill") as (tokenizer, decode, prefill):
        worker = prefill_service.Prefill(other, prefill)
        async with running(worker), running(Decode(config, decode)) as actor:
            world = World(tokenizer, actor, worker)
            await decode.directory.wait_for(lambda d: d.ready("prefill", model="tiny"), PATIENT)
            if (
                worker.card.kv_format == actor.card.kv_format
                and actor.config.remote_prefill != "never"
            ):
                await eventually(lambda: actor.stats()["prefill_workers"] == 1)
            else:
                await asyncio.sleep(0.25)  # it has looked, and found nobody
            yield world


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[World]:
    async with stage(folder) as made:
        yield made


@pytest.fixture(scope="module")
def due(folder: Path) -> Reply:
    """What the decode worker says that computes its prompts itself."""

    async def run() -> Reply:
        async with stage(folder, remote_prefill="never") as world:
            ids, timing = await world.tokens()
            assert world.decode.stats()["remote_prefills"] == 0
            assert "decode.transfer" not in timing
            return ids

    return asyncio.run(run())


async def eventually(condition: Callable[[], object], within: float = PATIENT) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  # the engine's thread changes what is waited for
            await asyncio.sleep(0.01)


async def test_a_prompt_is_computed_elsewhere(world: World, due: Reply) -> None:
    ids, timing = await world.tokens()
    assert ids == due
    stats = world.decode.stats()
    assert stats["remote_prefills"] == 1
    assert stats["tokens"] == len(due)  # the last of the prompt, and all but the last of the reply
    assert stats["kv_bytes_received"] == world.prefill.stats()["kv_bytes_sent"] > 0
    assert not stats["prefill_fallbacks"]
    assert timing["decode.transfer"] > 0
    await eventually(world.nothing_is_held)
    world.decode.check_integrity()
    world.prefill.check_integrity()
    (
        again,
        _,
    ) = (
        await world.tokens()
    )  # its beginning is cached here by now, and so is what came from elsewhere
    assert again == due
    assert world.prefill.stats()["kv_bytes_sent"] == stats["kv_bytes_received"]


async def test_so_it_is_over_tcp_and_for_many(folder: Path, due: Reply) -> None:
    async with stage(folder) as world:
        world.prefill.store._shared = False
        prompts = [PROMPT[number:] for number in range(1, 7)]
        found = await asyncio.gather(
            world.tokens(), *(world.tokens(prompt=prompt) for prompt in prompts)
        )
        assert found[0][0] == due
        assert len({tuple(ids) for ids, _ in found}) > 1
        assert world.decode.stats()["remote_prefills"] == 7
        assert not world.decode.stats()["prefill_fallbacks"]
        await eventually(world.nothing_is_held)


async def test_a_prompt_is_computed_at_the_sites_of_its_request_alone(
    world: World, due: Reply
) -> None:
    for bus, site in ((world.decode.bus, "a"), (world.prefill.bus, "b")):
        bus.site = bus.calls.site = site
        bus.heartbeat()
    await eventually(
        lambda: [beat.site for beat in world.decode.bus.directory.ready("prefill")] == ["b"]
    )
    await asyncio.sleep(0.25)  # decode has looked at its workers again
    with sites.only(("a",)):
        assert (await world.tokens())[0] == due
    assert world.prefill.bus.calls.requests == world.decode.stats()["remote_prefills"] == 0
    prompt = PROMPT[1:]
    with sites.only(("a", "b")):
        await world.tokens(prompt=prompt)
    assert world.prefill.bus.calls.requests == 1
    assert not world.decode.stats()["prefill_fallbacks"]
    await eventually(world.nothing_is_held)


async def test_a_prefill_worker_that_dies_midway_costs_time(world: World, due: Reply) -> None:
    world.slow_down()
    asking = asyncio.create_task(world.tokens())
    await world.midway()
    die(world.prefill.bus)
    ids, _ = await asking
    assert ids == due
    assert world.decode.stats()["prefill_fallbacks"] == {"worker_lost": 1}
    assert world.decode.stats()["tokens"] < len(PROMPT)  # what had come is not computed again
    await eventually(world.decode_is_free)
    world.decode.check_integrity()


async def test_one_that_says_nothing_is_given_up(folder: Path, due: Reply) -> None:
    async with stage(folder, prefill_patience=0.5) as world:
        world.slow_down(1.0)
        assert (await world.tokens())[0] == due
        assert world.decode.stats()["prefill_fallbacks"] == {"late": 1}
        await eventually(world.nothing_is_held)


async def test_leaving_midway_frees_both_sides(world: World) -> None:
    world.slow_down()
    async with world.open() as stream:
        await stream.start()
        await world.midway()
    await eventually(world.nothing_is_held, FREED_WITHIN)
    assert not world.decode.stats()["prefill_fallbacks"]
    world.decode.check_integrity()
    world.prefill.check_integrity()


async def test_a_decode_worker_that_dies_is_not_waited_for(world: World) -> None:
    world.slow_down()
    stream = world.open()
    await stream.start()
    await world.midway()
    die(world.decode.bus)
    await eventually(world.prefill_is_free, FREED_WITHIN)
    world.prefill.check_integrity()
    await stream.aclose()


async def test_damaged_bytes_are_not_taken(
    world: World, due: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: Callable[..., Awaitable[Any]] = BlobStore.put_async

    async def lie(store: BlobStore, *data: Any, **options: Any) -> Any:
        return msgspec.structs.replace(await put(store, *data, **options), digest="0" * 32)

    monkeypatch.setattr(BlobStore, "put_async", lie)
    assert (await world.tokens())[0] == due
    assert world.decode.stats()["prefill_fallbacks"] == {"blob": 1}
    assert world.decode.stats()["kv_parts_received"] == 0
    await eventually(world.nothing_is_held)


@pytest.mark.parametrize("host", [HOST, "elsewhere"])
async def test_what_leaves_the_host_has_a_checksum(
    world: World, due: Reply, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: Callable[..., Awaitable[BlobRef]] = BlobStore.put_async
    lent: list[BlobRef] = []

    async def watch(store: BlobStore, *data: Any, **options: Any) -> BlobRef:
        lent.append(await put(store, *data, **options))
        return lent[-1]

    monkeypatch.setattr(BlobStore, "put_async", watch)
    monkeypatch.setattr(prefill, "HOST", host)
    assert (await world.tokens())[0] == due
    assert lent
    assert all(bool(ref.digest) == (host == "elsewhere") for ref in lent)


async def test_what_asking_costs_is_measured(world: World) -> None:
    assert world.decode.stats()["prefill_delay"] == Delay.DEFAULT
    for turn in range(
        50
    ):  # the first has nothing to be compared with: nobody has told yet how fast it is
        await world.tokens(prompt=PROMPT[turn:])
        if world.decode.stats()["prefill_delay"] != Delay.DEFAULT:
            break
        await asyncio.sleep(0.1)
    assert 0 <= world.decode.stats()["prefill_delay"] != Delay.DEFAULT


async def test_a_worker_of_another_kind_is_not_asked(folder: Path, due: Reply) -> None:
    async with stage(folder, {"kv_dtype": "bfloat16"}) as world:
        assert (await world.tokens())[0] == due
        assert world.decode.stats()["remote_prefills"] == 0
        request = Prefill(model="tiny", prompt=PROMPT, kv_format=world.decode.card.kv_format)
        with refuses(BadRequest, "kv_format"):
            async with world.decode.bus.open("prefill", request) as stream:
                await anext(stream.batches())
        request = Prefill(
            model="tiny", prompt=PROMPT, kv_format=world.prefill.card.kv_format, start=len(PROMPT)
        )
        with refuses(BadRequest, "start"):
            async with world.decode.bus.open("prefill", request) as stream:
                await anext(stream.batches())


async def test_a_reader_that_waits_holds_up_its_own_prompt_only(world: World, due: Reply) -> None:
    """The store has room for a few parts: the others are computed when these have been read."""
    request = Prefill(model="tiny", prompt=PROMPT, kv_format=world.prefill.card.kv_format)
    async with world.decode.bus.open("prefill", request, window=2) as stream:
        await eventually(lambda: stream.received == 2)
        await eventually(lambda: world.prefill.stats()["out_of_credit"] == 1)
        assert (await world.tokens())[0] == due
        assert stream.received == 2
        count = 0
        async for body in stream:
            assert isinstance(body, KvChunk)
            count += body.end - body.first
            if body.last and body.stop == len(PROMPT):
                await stream.end_input()
    assert count == len(PROMPT)
    await eventually(world.nothing_is_held)


async def test_chat_is_not_routed_to_it(world: World) -> None:
    directory = world.tokenizer.directory
    await directory.wait_for(
        lambda d: d.ready("prefill", model="tiny") and d.ready("decode", model="tiny"), PATIENT
    )
    assert {beat.role for beat in directory.ready("prefill", model="tiny")} == {"prefill"}
    picked = {Router(directory).pick("tiny") for _ in range(4)}
    assert picked == {world.decode.bus.instance}
