"""Graphs of stages: what is declared wrongly is refused, and stages stream, fail and are left as declared."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import pytest

from motet_pipelines.graphs import spoken
from motet_pipelines.graphs.graph import Call, Graph, GraphOutcome, Items, Run, Stage, merged, run
from motet_shared.errors import BadRequest, MotetError, StreamBroken, Unavailable
from motet_shared.messages import BlobRef, Chat, Sampling, StateRef, States
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH
from motet_shared.wire.stream import Stream


@dataclass
class Word:
    text: str


@dataclass
class Sound:
    text: str


async def words(call: Call, _: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
    for word in ("one", "two", "three"):
        yield [Word(word)]
        await asyncio.sleep(0)


async def sounds(call: Call, inputs: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
    async for batch in inputs["words"]:
        yield [Sound(item.text) for item in batch]


def failing(error: MotetError) -> Run:
    async def fails(call: Call, inputs: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
        async for batch in inputs["words"]:
            yield [Sound(batch[0].text)]
            raise error

    return fails


def graph(speak: Run = sounds, *, optional: bool = True) -> Graph:
    return Graph(
        "test",
        stages=(
            Stage("write", role="tokenizer", run=words, gives={"words": Word}),
            Stage(
                "speak",
                role="tts",
                run=speak,
                takes=("words",),
                gives={"sounds": Sound},
                optional=optional,
            ),
        ),
        yields=("words", "sounds"),
    )


def call() -> Call:
    return Call(bus=cast(Bus, None), requests={})


async def all_of(declared: Graph, outcome: GraphOutcome | None = None) -> list[Any]:
    found: list[Any] = []
    async with aclosing(run(declared, call(), outcome)) as batches:
        async for batch in batches:
            found += batch
    return found


async def test_items_reach_the_next_stage_and_the_caller_as_they_come() -> None:
    found = await all_of(graph())
    assert [one.text for one in found if isinstance(one, Word)] == ["one", "two", "three"]
    assert [one.text for one in found if isinstance(one, Sound)] == ["one", "two", "three"]
    assert found.index(Sound("one")) < found.index(Word("three"))


async def test_an_optional_stage_that_dies_is_left_out() -> None:
    outcome, error = GraphOutcome(), Unavailable("it is gone")
    found = await all_of(graph(failing(error)), outcome)
    assert [one.text for one in found if isinstance(one, Word)] == ["one", "two", "three"]
    assert Sound("one") in found
    assert outcome.lost == {"speak": error}


@pytest.mark.parametrize(
    ("error", "optional"), [(Unavailable("gone"), False), (BadRequest("wrong"), True)]
)
async def test_other_errors_end_the_graph(error: MotetError, optional: bool) -> None:
    with pytest.raises(type(error)):
        await all_of(graph(failing(error), optional=optional))


async def test_leaving_closes_all_stages() -> None:
    closed = []

    async def endless(call: Call, inputs: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
        try:
            while True:
                yield [Sound("")]
                await asyncio.sleep(0)
        finally:
            closed.append("speak")

    async with aclosing(run(graph(endless), call())) as batches:
        async for _ in batches:
            break
    assert closed == ["speak"]


def test_what_cannot_be_is_refused_when_it_is_declared() -> None:
    write, speak = graph().stages
    with pytest.raises(ValueError, match="no stage before it gives"):
        Graph("test", stages=(speak, write), yields=())
    with pytest.raises(ValueError, match="which no stage gives"):
        Graph("test", stages=(write,), yields=("sounds",))
    with pytest.raises(ValueError, match="two stages give"):
        Graph("test", stages=(write, write), yields=())


def test_speech_may_be_missing_where_the_model_speaks_itself() -> None:
    optional = [stage.name for stage in spoken.OMNI.stages if stage.optional]
    assert optional == [spoken.SPEAK]
    assert {stage.role for stage in spoken.OMNI.stages} == {"tokenizer", "tts"}


async def test_items_of_several_stages_come_in_their_order() -> None:
    """Answers are recorded in the order in which they come; another process renders them so."""
    given: list[int] = []
    turn = asyncio.Event()

    async def source(first: int) -> AsyncGenerator[int, None]:
        for number in range(20):
            await turn.wait()
            given.append(first + number)
            yield first + number

    async def let_all_go() -> None:
        while True:
            turn.set()
            await asyncio.sleep(0)
            turn.clear()
            await asyncio.sleep(0)

    going = asyncio.create_task(let_all_go())
    try:
        found = [item async for item in merged(*(source(100 * number) for number in range(8)))]
    finally:
        going.cancel()
    assert len(found) == 160
    assert found == given


async def test_states_that_are_computed_again_end_with_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thinker's stream would stay open until the garbage collector runs, which is rare."""
    ended: list[str] = []

    async def chat(*_: object, **__: object) -> AsyncGenerator[list[Any], None]:
        try:
            while True:
                yield [States(StateRef(states=BlobRef("shm", "a", "k", 4)), 1)]
        finally:
            ended.append("chat")

    async def nothing() -> AsyncGenerator[list[Any], None]:
        for batch in cast(list[list[Any]], []):
            yield batch

    class Broken:
        async def send(self, data: bytes) -> None:
            raise StreamBroken("the speech moves")

    monkeypatch.setattr(spoken, "chat_with_prompt", chat)
    request = Chat(model="m", messages=[], sampling=Sampling())
    call = Call(bus=cast(Bus, None), requests={spoken.THINK: request})
    reply = spoken._Reply(call, {"states": nothing(), "text": nothing()}, NO_EPOCH)
    reply._is_read = True
    gc.disable()
    try:
        with pytest.raises(StreamBroken) as raised:
            await reply.feed(cast(Stream, Broken()))
        assert ended == ["chat"]
        assert raised.value.retryable
    finally:
        gc.enable()
