"""The tokenizer service over the in-memory bus: instances that die, refuse or stall, and streams that move."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import Draining, InternalError, Overloaded, StreamBroken, Unavailable
from motet_shared.messages import Resume, Sampling, Text
from motet_shared.testing import die, settle
from support.checkpoints.tiny_tokenizers import EOS, byte_level, write_folder
from support.stages.tokenizer_stage import (
    CALL,
    REPLY,
    SCRIPT,
    TOOL,
    Answer,
    Stage,
    chat,
    stage_in_memory,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage:
        yield stage


# --------------------------------------------------------------------------------------------------------------- faults
async def test_a_request_outlives_its_decode_instance(stage: Stage) -> None:
    first = await stage.decode(step=2)
    first.pause_at = 8
    asking = asyncio.create_task(
        stage.ask(chat(sampling=Sampling(seed=7, logprobs=0), tools=[TOOL]))
    )
    await first.paused.wait()
    second = await stage.decode()
    die(first.bus)
    answer = await asking
    assert answer.text == REPLY
    assert answer.ids == SCRIPT
    assert (
        b"".join([e.token for item in answer.items for e in item.logprobs or ()]) == REPLY.encode()
    )
    assert second.requests[0].output == SCRIPT[:8]
    assert second.requests[0].sampling == first.requests[0].sampling
    assert stage.tokenizer.stats()["failovers"] == 1


async def test_a_request_waits_for_an_instance_to_appear(stage: Stage) -> None:
    asking = asyncio.create_task(stage.ask(chat()))
    await asyncio.sleep(0.05)
    assert stage.tokenizer.stats()["waiting_for_decode"] == 1
    await stage.decode()
    assert (await asking).text == REPLY
    assert stage.tokenizer.stats()["waiting_for_decode"] == 0


async def test_without_any_instance_the_error_is_retryable(stage: Stage) -> None:
    with pytest.raises(Unavailable) as caught:
        await stage.ask(chat())
    assert caught.value.retryable


async def test_an_overloaded_instance_is_passed_by(stage: Stage) -> None:
    first, second = await stage.decode(), await stage.decode()
    first.refuse = Overloaded("full")
    for _ in range(3):
        assert (await stage.ask(chat())).text == REPLY
    assert len(second.requests) == 3
    second.refuse = Overloaded("full too")
    with pytest.raises(Overloaded):
        await stage.ask(chat())


async def test_a_running_request_waits_where_its_refuge_is_overloaded(stage: Stage) -> None:
    first = await stage.decode()
    first.pause_at = 4
    asking = asyncio.create_task(stage.ask(chat()))
    await first.paused.wait()
    second = await stage.decode()
    second.refuse = Overloaded("full")
    die(first.bus)
    async with asyncio.timeout(20):
        while not second.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    second.refuse = None
    assert (await asking).text == REPLY


async def test_an_instance_that_drains_is_passed_by(stage: Stage) -> None:
    first, second = await stage.decode(), await stage.decode()
    first.bus.calls.state = "draining"  # its heartbeat has not come yet
    for _ in range(2):
        assert (await stage.ask(chat())).text == REPLY
    assert (len(first.requests), len(second.requests)) == (0, 2)


async def test_a_request_that_breaks_every_instance_ends(stage: Stage) -> None:
    for _ in range(2):
        (await stage.decode()).refuse = StreamBroken("broken")
    with pytest.raises(StreamBroken):
        await stage.ask(chat())
    assert stage.tokenizer.stats()["failovers"] == 2


async def test_a_bug_in_decode_is_not_tried_elsewhere(stage: Stage) -> None:
    decode, other = await stage.decode(), await stage.decode()
    decode.refuse = other.refuse = InternalError("a bug")
    with pytest.raises(InternalError, match="a bug"):
        await stage.ask(chat())
    assert len(decode.requests) + len(other.requests) == 1


async def test_losing_decode_after_the_last_token_loses_nothing(stage: Stage) -> None:
    decode = await stage.decode()
    decode.pause_at = len(SCRIPT)  # its End never comes
    asking = asyncio.create_task(stage.ask(chat()))
    await decode.paused.wait()
    await settle()
    die(decode.bus)
    answer = await asking
    assert (answer.text, answer.ids, answer.end.status) == (REPLY, SCRIPT, "stop")
    assert stage.tokenizer.stats()["failovers"] == 0


async def test_a_decode_instance_that_goes_on_too_long_is_left(stage: Stage) -> None:
    decode = await stage.decode([*SCRIPT, *SCRIPT, *SCRIPT])
    decode.deaf = True
    answer = await stage.ask(chat())
    assert (answer.text, answer.ids, answer.end.status) == (REPLY, SCRIPT, "stop")


async def test_a_client_that_leaves_cancels_decode(stage: Stage) -> None:
    decode = await stage.decode()
    decode.pause_at = 3
    async with stage.gateway.open("tokenizer", chat()) as stream:
        async for _ in stream:
            break
    await stage.idle()
    await settle()
    assert decode.cancelled == 1


async def test_a_slow_client_holds_up_only_its_own_request(stage: Stage) -> None:
    decode = await stage.decode()
    async with stage.gateway.open("tokenizer", chat(), window=2) as slow:
        stream = aiter(slow)
        await anext(stream)
        await settle(200)
        stalled = decode.sent
        assert (
            stalled < 2 + 4 * 3 < len(SCRIPT)
        )  # the client's window, and decode's with what is under way
        assert (await stage.ask(chat())).text == REPLY
        assert decode.sent == stalled + len(SCRIPT)
        rest = [item async for item in stream]
    texts = [item.text for item in rest if isinstance(item, Text)]
    assert REPLY.endswith("".join(texts))


# --------------------------------------------------------------------------------------------------------------- resume
def cut(items: list[Text], count: int) -> Resume:
    """What a client knows that has received `count` items."""
    got = items[:count]
    length = sum(len(i.text) + sum(len(d.arguments) for d in i.tools or ()) for i in got)
    return Resume([token for item in got for token in item.ids], length)


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [TOOL]}, {"stop": ["}}", "square."]}, {"max_tokens": 9}]
)
async def test_resumed_anywhere_the_rest_is_the_same(stage: Stage, fields: dict[str, Any]) -> None:
    decode = await stage.decode([*byte_level().encode(REPLY + CALL).ids, EOS], step=2)
    whole = await stage.ask(chat(**fields))
    for count in range(1, len(whole.items) + 1, 3):
        resume = cut(whole.items, count)
        rest = await stage.ask(chat(**fields, resume=resume))
        joined = Answer()
        joined.items = whole.items[:count] + rest.items
        assert joined.text == whole.text
        assert joined.ids == whole.ids
        assert deltas(joined) == deltas(whole)
        assert rest.end.status == whole.end.status
        assert rest.end.usage is not None
        assert whole.end.usage is not None
        assert rest.end.usage.completion_tokens == whole.end.usage.completion_tokens
        if rest.items:
            assert decode.requests[-1].output == resume.ids


def deltas(answer: Answer) -> list[tuple[int, str, str, str]]:
    """Tool calls, with their arguments joined."""
    pieces = [delta for item in answer.items for delta in item.tools or ()]
    calls = []
    for index, group in itertools.groupby(pieces, key=lambda delta: delta.index):
        parts = list(group)
        calls.append(
            (index, parts[0].id, parts[0].name, "".join([part.arguments for part in parts]))
        )
    return calls


async def test_a_reply_that_was_complete_needs_no_decode(stage: Stage) -> None:
    decode = await stage.decode()
    whole = await stage.ask(chat())
    rest = await stage.ask(chat(resume=cut(whole.items, len(whole.items))))
    assert rest.items == []
    assert rest.end.status == "stop"
    assert len(decode.requests) == 1


async def test_a_resume_that_does_not_fit_is_refused(stage: Stage) -> None:
    await stage.decode()
    with pytest.raises(StreamBroken):
        await stage.ask(chat(resume=Resume(SCRIPT[:3], 999)))


async def test_a_tokenizer_that_drains_takes_no_new_request(stage: Stage) -> None:
    await stage.decode()
    stage.tokenizer.bus.calls.state = "draining"
    with pytest.raises(Draining):
        await stage.ask(chat())
