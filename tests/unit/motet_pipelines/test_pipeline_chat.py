"""The chat pipeline: streams that move to another tokenizer lose, repeat and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest

from motet_pipelines.chat.chat import Outcome, chat, chat_with_prompt
from motet_shared.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    Overloaded,
    Unavailable,
    UnknownModel,
    WorkerLost,
)
from motet_shared.messages import Chat, PromptLogprob, PromptPiece, Sampling, Text, ToolCallDelta
from motet_shared.testing import MemoryHub, die, memory_bus, memory_buses, settle
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import MOVES
from support.running.refusals import refuses
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer, words

REQUEST = Chat(
    model=MODEL, messages=[{"role": "user", "content": "count"}], sampling=Sampling(seed=7)
)
COUNT = " ".join(str(number) for number in range(200))


@asynccontextmanager
async def stack(tokenizers: int = 2) -> AsyncIterator[tuple[Bus, list[FakeTokenizer], MemoryHub]]:
    """A caller, some tokenizers that count, and a decode."""
    async with AsyncExitStack() as stack:
        hub = MemoryHub()
        (caller, decode) = await stack.enter_async_context(
            memory_buses("gateway", "decode", hub=hub)
        )
        await FakeDecode(None, decode).start()
        actors = [await start_tokenizer(hub, stack) for _ in range(tokenizers)]
        await settle()
        yield caller, actors, hub


async def start_tokenizer(hub: MemoryHub, stack: AsyncExitStack) -> FakeTokenizer:
    bus = await memory_bus(hub, "tokenizer")
    stack.push_async_callback(bus.close)
    actor = FakeTokenizer(None, bus)
    actor.reply, actor.pace = lambda request: words(COUNT), 0.002
    await actor.start()
    return actor


async def said(
    bus: Bus, outcome: Outcome | None = None, request: Chat = REQUEST, **options: Any
) -> str:
    async with aclosing(chat(bus, request, outcome, **options)) as batches:
        return "".join([item.text async for batch in batches for item in batch])


def serving(actors: list[FakeTokenizer]) -> FakeTokenizer:
    return next(actor for actor in actors if actor.bus.calls.active)


async def test_a_reply_and_its_end() -> None:
    async with stack() as (bus, actors, _):
        outcome = Outcome()
        assert await said(bus, outcome) == COUNT
        assert outcome.end is not None
        assert outcome.end.usage is not None
        assert (outcome.end.status, outcome.end.usage.completion_tokens, outcome.moves) == (
            "stop",
            200,
            0,
        )
        assert outcome.instance in [actor.bus.instance for actor in actors]


async def test_nothing_is_lost_repeated_or_changed_when_the_tokenizer_dies() -> None:
    async with stack() as (bus, actors, _):
        outcome = Outcome()
        task = asyncio.create_task(said(bus, outcome))
        await asyncio.sleep(0.1)
        victim = serving(actors)
        die(victim.bus)
        assert await asyncio.wait_for(task, 20) == COUNT
        (survivor,) = (actor for actor in actors if actor is not victim)
        resumed = survivor.requests[-1]
        assert resumed.resume is not None
        assert resumed.resume.text_len == len(
            "".join(item.text for item in words(COUNT)[: len(resumed.resume.ids)])
        )
        assert resumed.sampling.seed == 7
        assert (outcome.moves, outcome.instance) == (1, survivor.bus.instance)


@pytest.mark.parametrize("refused", [0, 3])
async def test_a_sink_takes_text_and_nothing_is_lost_when_the_tokenizer_dies(refused: int) -> None:
    """`refused`: one of so many offers is; what it does not take comes in a batch."""
    items = words(COUNT)
    items[60].tools = [ToolCallDelta(0, "c", "draw", "{}")]
    async with stack() as (bus, actors, _):
        for actor in actors:
            actor.reply = lambda request: items[:]
        found: list[Text] = []
        batches_of_reader: list[list[Any]] = []
        offers = 0

        def sink(batch: list[Text], record: Callable[[], None]) -> bool:
            nonlocal offers
            offers += 1
            if refused and offers % refused == 0:
                return False
            record()
            found.extend(batch)
            return True

        async def read() -> None:
            stream = chat_with_prompt(bus, REQUEST, outcome, sink=sink)
            async with aclosing(stream) as batches:
                async for batch in batches:
                    batches_of_reader.append(batch)
                    found.extend(batch)  # type: ignore[arg-type]

        outcome = Outcome()
        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        victim = serving(actors)
        die(victim.bus)
        await asyncio.wait_for(task, 20)
        assert "".join(item.text for item in found) == COUNT
        assert outcome.moves == 1
        (survivor,) = (actor for actor in actors if actor is not victim)
        resume = survivor.requests[-1].resume
        assert resume is not None
        assert resume.ids == [i for item in items[: len(resume.ids)] for i in item.ids]
        in_batches = [item for batch in batches_of_reader for item in batch]
        assert [item.tools for item in in_batches if item.tools] == [items[60].tools]
        if not refused:
            assert len(in_batches) < 20  # the call, and what came with it


async def test_pieces_of_a_prompt_are_not_repeated_when_the_tokenizer_dies() -> None:
    ids = list(range(200))
    scored = [
        PromptPiece(at, ids[at : at + 4], [PromptLogprob(b"x", -0.5)] * 4)
        for at in range(0, len(ids), 4)
    ]
    async with stack() as (bus, actors, _):
        pieces: list[Any] = [PromptPiece(0, ids), *scored, *words(COUNT)]
        for actor in actors:
            actor.reply = lambda request: pieces[:]
        found: list[Any] = []
        outcome = Outcome()
        dead = False
        async with aclosing(chat_with_prompt(bus, REQUEST, outcome)) as batches:
            async for batch in batches:
                found += batch
                if len(found) > 20 and not dead:
                    dead = True
                    die(serving(actors).bus)
        assert outcome.moves == 1
        assert found == pieces


async def test_a_lone_tokenizer_may_come_back() -> None:
    async with stack(1) as (bus, actors, hub), AsyncExitStack() as later:
        task = asyncio.create_task(said(bus))
        await asyncio.sleep(0.1)
        die(actors[0].bus)
        await asyncio.sleep(0.3)
        await start_tokenizer(hub, later)
        assert await asyncio.wait_for(task, 20) == COUNT


async def test_the_length_counts_tool_arguments() -> None:
    async with stack() as (bus, actors, _):
        items = [Text("ab", [1], [ToolCallDelta(0, "c", "draw", "{}")]), Text("c", [2])]
        for actor in actors:
            actor.reply, actor.pace = lambda request: items, 0.3
        task = asyncio.create_task(said(bus))
        await asyncio.sleep(0.1)
        victim = serving(actors)
        die(victim.bus)
        assert await asyncio.wait_for(task, 20) == "abc"
        resume = next(actor for actor in actors if actor is not victim).requests[-1].resume
        assert resume is not None
        assert (resume.ids, resume.text_len) == ([1], 4)


async def test_patience_ends() -> None:
    async with stack(1) as (bus, actors, _):
        task = asyncio.create_task(said(bus, patience=0.3))
        await asyncio.sleep(0.1)
        die(actors[0].bus)
        with pytest.raises((WorkerLost, Unavailable)):
            await asyncio.wait_for(task, 20)


async def test_a_request_that_kills_its_tokenizers_is_given_up() -> None:
    async with stack(1) as (bus, actors, _):
        actors[0].error, actors[0].fail_after = WorkerLost("again"), 1
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(said(bus), 20)
        assert len(actors[0].requests) == MOVES + 1


async def test_a_draining_tokenizer_is_passed_over() -> None:
    async with stack(2) as (bus, actors, _):
        actors[0].error = actors[1].error = Draining("stopping")
        task = asyncio.create_task(said(bus))
        await asyncio.sleep(0.15)
        actors[0].error = actors[1].error = None
        assert await asyncio.wait_for(task, 20) == COUNT


async def test_overload_is_told_at_once_unless_text_was_sent() -> None:
    async with stack(2) as (bus, actors, _):
        for actor in actors:
            actor.error = Overloaded("full")
        with pytest.raises(Overloaded):
            await asyncio.wait_for(said(bus, patience=60), 20)
        for actor in actors:
            actor.error = None
        task = asyncio.create_task(said(bus))
        await asyncio.sleep(0.1)
        victim = serving(actors)
        survivor = next(actor for actor in actors if actor is not victim)
        survivor.error = Overloaded("full")
        die(victim.bus)
        await asyncio.sleep(0.3)
        survivor.error = None
        assert await asyncio.wait_for(task, 20) == COUNT


async def test_other_errors_are_raised_at_once() -> None:
    async with stack() as (bus, actors, _):
        for actor in actors:
            actor.error = ContextTooLong("too long")
        with pytest.raises(ContextTooLong):
            await said(bus)
        assert sum(len(actor.requests) for actor in actors) == 1
        with refuses(UnknownModel, "model"):
            await said(bus, request=Chat(model="gpt-99", messages=[], sampling=Sampling()))


async def test_the_deadline_holds_over_moves() -> None:
    async with stack() as (bus, actors, _):
        for actor in actors:
            actor.pace = 60
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(said(bus, deadline=0.3), 20)


async def test_leaving_is_a_remote_cancel() -> None:
    async with stack(1) as (bus, actors, _):
        async with aclosing(chat(bus, REQUEST)) as batches:
            async for _batch in batches:
                break
        await settle(50)
        assert actors[0].cancelled == 1
        assert not bus.caller.streams


async def test_the_less_busy_tokenizer_is_asked() -> None:
    async with stack(2) as (bus, actors, _):
        replies = await asyncio.gather(*(said(bus) for _ in range(8)))
        assert replies == [COUNT] * 8
        assert [len(actor.requests) for actor in actors] == [4, 4]
