"""A newer reply of a realtime session ends what is still done for the older ones."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet_shared import errors
from motet_shared.messages import Chat, Echo, Sampling
from motet_shared.testing import FakeClock, MemoryHub, memory_bus, running, settle
from motet_shared.wire import subjects
from motet_shared.wire.epochs import NO_EPOCH, Epoch, Epochs
from motet_shared.wire.stream import Stream
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints.tiny_tokenizers import write_folder
from support.services.scripted_decode import ScriptedDecode
from support.services.stream_world import LoseOnce, World, ids
from support.stages.tokenizer_stage import SCRIPT

ENDLESS = Echo(count=10_000, delay_ms=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(MemoryHub(), FakeClock())
    yield world
    await world.close()


def of_session(number: int, session: str = "sess_a") -> Epoch:
    return Epoch(session, number)


async def test_a_newer_reply_ends_the_older_ones_of_its_session(world: World) -> None:
    """Whoever asked for them, and without any cancel: the fence behind it."""
    one, two, echo_worker = await world.gateway(), await world.gateway(), await world.echo_worker()
    kept = [
        one.open("tokenizer", ENDLESS, epoch=of_session(7, "sess_b")),
        one.open("tokenizer", ENDLESS),  # beside the conversation
        two.open("tokenizer", ENDLESS, epoch=of_session(2)),
        two.open("tokenizer", ENDLESS, epoch=of_session(2)),  # the same reply has several
    ]
    old = [one.open("tokenizer", ENDLESS, epoch=of_session(1)) for _ in range(2)]
    for stream in (*old, *kept):
        await stream.start()
        await settle()
    assert sorted(echo_worker.served, key=echo_worker.served.index)[:2] == [
        f"{one.instance}/{stream.number}" for stream in old
    ]
    assert echo_worker.ended == ["cancelled"] * 2
    assert {call.id for call in echo_worker.bus.calls.active.values()} == set(
        echo_worker.served[2:]
    )
    for stream in old:
        with pytest.raises(errors.Cancelled):
            await ids(stream)
    for stream in kept:
        assert not stream.done
        await stream.aclose()
    await settle()
    echo_worker.check_integrity()
    assert not echo_worker.bus.calls.active


async def test_what_comes_late_for_an_old_reply_is_refused(world: World) -> None:
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    assert await ids(gateway.open("tokenizer", Echo(count=1), epoch=of_session(2))) == [0]
    with pytest.raises(errors.Cancelled) as refused:
        await ids(gateway.open("tokenizer", Echo(count=1), epoch=of_session(1)))
    assert not refused.value.retryable, "it would be tried elsewhere"
    assert await ids(gateway.open("tokenizer", Echo(count=2), epoch=of_session(2))) == [0, 1]
    assert await ids(gateway.open("tokenizer", Echo(count=1), epoch=of_session(1, "sess_b"))) == [0]
    assert len(echo_worker.served) == 3


async def test_a_lost_cancel_does_not_keep_an_old_reply_alive(world: World) -> None:
    """The caller paused it for good: it sends no frame that would tell the worker that nobody listens."""
    gateway, echo_worker = await world.gateway(), await world.echo_worker()
    lost = world.hub.lose = LoseOnce(
        lambda message: message.subject == subjects.control_at(echo_worker.bus.instance)
    )
    async with gateway.open("tokenizer", Echo(count=9), window=3, epoch=of_session(1)) as stream:
        await settle()
    await settle()
    assert (stream.received, lost.lost, len(echo_worker.bus.calls.active)) == (3, 1, 1)
    assert await ids(gateway.open("tokenizer", Echo(count=1), epoch=of_session(2))) == [0]
    assert echo_worker.ended == ["cancelled", "complete"]


async def test_an_epoch_goes_all_the_way(folder: Path) -> None:
    """Another tokenizer than the one that serves the old reply: decode alone sees both."""
    hub = MemoryHub()
    async with contextlib.AsyncExitStack() as stack:
        gateway = await memory_bus(hub, "gateway")
        stack.push_async_callback(gateway.close)
        decode = ScriptedDecode(await memory_bus(hub, "decode"), SCRIPT)
        decode.pause_at = 3
        config = TokenizerConfig(model=(f"tiny={folder}",), metrics_port=-1)
        tokenizers = [Tokenizer(config, await memory_bus(hub, "tokenizer")) for _ in range(2)]
        for actor in (decode, *tokenizers):
            await stack.enter_async_context(running(actor))
        await settle()

        def chat(number: int) -> Stream:
            ask = Chat(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                sampling=Sampling(temperature=0),
            )
            at = tokenizers[number - 1].bus.instance
            return gateway.open("tokenizer", ask, instance=at, epoch=Epoch("sess_a", number))

        old = chat(1)
        await old.start()
        await asyncio.wait_for(decode.paused.wait(), 10)
        async with chat(2) as new:
            await asyncio.wait_for(anext(new.batches()), 10)
            await settle()
            assert [call.epoch for call in decode.bus.calls.active.values()] == [Epoch("sess_a", 2)]
            with pytest.raises(errors.Cancelled):
                _ = [item async for item in old]
        await settle()
        for actor in (decode, *tokenizers):
            actor.check_integrity()


def test_sessions_are_remembered_within_bounds() -> None:
    epochs = Epochs(most=3)
    assert [epochs.note(Epoch(f"s{number}", 5)) for number in range(3)] == [True] * 3
    assert not epochs.note(Epoch("s0", 5))
    assert epochs.note(Epoch("s3", 1))
    assert len(epochs) == 3
    assert not epochs.is_over(Epoch("s1", 1)), "the one that was silent for longest is forgotten"
    assert epochs.is_over(Epoch("s0", 4))
    assert not epochs.note(NO_EPOCH)
    assert not epochs.is_over(NO_EPOCH)
