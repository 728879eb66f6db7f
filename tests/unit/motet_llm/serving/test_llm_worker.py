"""The decode actor: the engine behind the wire, on the in-memory bus."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_llm.config import DecodeConfig
from motet_llm.engine.outputs import Emit, StepOutput
from motet_llm.service import Decode
from motet_shared import errors
from motet_shared.messages import Generate, Sampling, Tokens
from motet_shared.testing import memory_buses, running
from motet_shared.text.prefixes import chain
from motet_shared.wire.bus import Bus
from motet_tokenizer.prefix_index import PrefixIndex
from motet_tokenizer.router import PromptLoad, Router
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.refusals import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker") / "tiny"
    path.mkdir()
    tiny_checkpoint("llama", path)
    return path


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[tuple[Bus, Decode]]:
    config = DecodeConfig(
        model=str(folder), num_blocks=64, threads=1, metrics_port=-1, step_timeout=1.0
    )
    async with (
        memory_buses("tokenizer", "decode") as (tokenizer, bus),
        running(Decode(config, bus)) as actor,
    ):
        yield tokenizer, actor


def generate(max_tokens: int = 10, **fields: Any) -> Generate:
    sampling = Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(
        Generate(model="tiny", prompt=[5, 6, 7], sampling=sampling), **fields
    )


async def tokens(bus: Bus, request: Generate, **options: Any) -> list[int]:
    found: list[int] = []
    async with bus.open("decode", request, **options) as stream:
        async for body in stream:
            assert isinstance(body, Tokens)
            found += body.ids
    return found


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the engine's thread changes what is waited for
            await asyncio.sleep(0.01)


async def test_tokens_usage_and_times_come_back(world: tuple[Bus, Decode]) -> None:
    tokenizer, actor = world
    async with tokenizer.open("decode", generate()) as stream:
        ids = [i async for body in stream for i in body.ids]  # type: ignore[union-attr]
    assert len(ids) == 10
    assert stream.end is not None
    assert stream.end.status == "length"
    assert stream.end.usage is not None
    assert (stream.end.usage.prompt_tokens, stream.end.usage.completion_tokens) == (3, 10)
    assert {
        "decode.queue",
        "decode.prefill",
        "decode.decode",
        "decode.model",
    } <= stream.end.timing.keys()
    actor.check_integrity()


async def test_a_stream_goes_on_where_another_instance_left_it(world: tuple[Bus, Decode]) -> None:
    tokenizer, _ = world
    whole = await tokens(tokenizer, generate(20))
    assert await tokens(tokenizer, generate(20, output=whole[:7])) == whole[7:]


async def test_many_streams_share_messages(world: tuple[Bus, Decode]) -> None:
    tokenizer, actor = world
    alone = await tokens(tokenizer, generate(20))
    assert await asyncio.gather(*(tokens(tokenizer, generate(20)) for _ in range(8))) == [alone] * 8
    assert actor.bus.calls.outbox.parts > 2 * actor.bus.calls.outbox.messages


async def test_leaving_frees_the_blocks(world: tuple[Bus, Decode]) -> None:
    tokenizer, actor = world
    async with tokenizer.open("decode", generate(200)) as stream:
        await anext(stream.batches())
        assert actor.stats()["blocks_free"] < 64
    await eventually(lambda: actor.stats()["blocks_free"] == 64)
    actor.check_integrity()


async def test_a_reader_that_waits_pauses_its_request_only(world: tuple[Bus, Decode]) -> None:
    tokenizer, actor = world
    async with tokenizer.open("decode", generate(200), window=4) as slow:
        await eventually(lambda: slow.received == 4)
        assert len(await tokens(tokenizer, generate(50))) == 50
        await eventually(lambda: actor.stats()["out_of_credit"] == 1)
        assert slow.received == 4


async def test_refusals_arrive_with_their_type(world: tuple[Bus, Decode]) -> None:
    tokenizer, _ = world
    with refuses(errors.UnknownModel, "model"):
        await tokens(tokenizer, generate(model="other"))
    with pytest.raises(errors.ContextTooLong):
        await tokens(tokenizer, generate(prompt=[5] * 5000))
    with pytest.raises(errors.BadRequest):
        await tokens(tokenizer, generate(prompt=[10**6]))
    assert len(await tokens(tokenizer, generate())) == 10


async def test_an_engine_that_hangs_crashes_its_actor(
    world: tuple[Bus, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, actor = world

    def step(emit: Emit) -> list[StepOutput]:
        time.sleep(2)
        return []

    monkeypatch.setattr(actor.thread.engine, "step", step)
    stream = tokenizer.open("decode", generate())
    await stream.start()
    with pytest.raises(errors.InternalError, match="step_timeout"):
        await asyncio.wait_for(actor.wait_crashed(), 20)
    await stream.aclose()


async def test_an_engine_that_fails_crashes_its_actor(
    world: tuple[Bus, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, actor = world

    def step(emit: Emit) -> list[StepOutput]:
        raise MemoryError("no more")

    monkeypatch.setattr(actor.thread.engine, "step", step)
    stream = tokenizer.open("decode", generate())
    await stream.start()
    with pytest.raises(MemoryError):
        await asyncio.wait_for(actor.wait_crashed(), 20)
    await stream.aclose()


async def test_what_it_serves_is_announced(world: tuple[Bus, Decode]) -> None:
    tokenizer, _ = world
    (beat,) = await tokenizer.directory.wait_for(lambda d: d.ready("decode", model="tiny"), 20)
    assert beat.models[0].context > 0
    assert beat.load["kv_free"] == 1.0


async def test_a_conversation_is_routed_to_where_its_beginning_is_cached(folder: Path) -> None:
    config = DecodeConfig(model=str(folder), num_blocks=64, threads=1, metrics_port=-1)
    buses = memory_buses("tokenizer", "decode", "decode")
    async with (
        buses as (tokenizer, one, other),
        running(Decode(config, one)),
        running(Decode(config, other)),
    ):
        index = PrefixIndex(tokenizer)
        await index.start()
        router = Router(tokenizer.directory, index)
        for bus, start in ((one, 5), (other, 100)):
            prompt, instance = [start + i % 7 for i in range(50)], bus.instance
            reply = await tokens(tokenizer, generate(20, prompt=prompt), instance=instance)
            turn = [*prompt, *reply, 1, 2, 3]
            blocks = chain(turn, 16)[:4]  # 69 tokens were computed
            await eventually(lambda: index.held(instance, blocks) == 4)  # noqa: B023
            await eventually(
                lambda: tokenizer.directory.ready("decode", model="tiny")[0].load["prefill_token"]
            )
            assert {router.pick("tiny", load=PromptLoad(turn)) for _ in range(8)} == {instance}
            async with tokenizer.open(
                "decode", generate(1, prompt=turn), instance=instance
            ) as stream:
                async for _ in stream:
                    pass
            assert stream.end is not None
            assert stream.end.usage is not None
            assert stream.end.usage.cached_tokens >= 64
        assert index.counts["cache_dumps"] == 0
