"""The chat pipeline over real tokenizers: one dies at any token, and text, tool calls and ids are what was due."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest

from motet_pipelines.chat.chat import Outcome, chat
from motet_shared.messages import Chat, Sampling, Text
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints.tiny_tokenizers import EOS, byte_level, write_folder
from support.services.scripted_decode import MODEL, ScriptedDecode
from support.stages.tokenizer_stage import CALL, REPLY, TOOL

REQUEST = Chat(
    model=MODEL,
    messages=[{"role": "user", "content": "hello"}],
    sampling=Sampling(seed=7, logprobs=0),
    tools=[TOOL],
    stop=["never said"],
)


async def said(bus: Bus, outcome: Outcome) -> list[Text]:
    async with aclosing(chat(bus, REQUEST, outcome)) as batches:
        return [item async for batch in batches for item in batch]


def shown(items: list[Text]) -> tuple[str, str, list[int], bytes]:
    """Text, arguments, ids, and the bytes of the log-probabilities."""
    tools = "".join(tool.name + tool.arguments for item in items for tool in item.tools or ())
    logprobs = b"".join(entry.token for item in items for entry in item.logprobs or ())
    return (
        "".join(item.text for item in items),
        tools,
        [i for item in items for i in item.ids],
        logprobs,
    )


async def with_a_death(
    folder: Path, script: list[int], position: int
) -> tuple[list[Text], Outcome]:
    """What a client gets when the tokenizer that serves it dies after `position` tokens (-1: none dies)."""
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        gateway, *buses = [
            await memory_bus(hub, role) for role in ("gateway", "tokenizer", "tokenizer", "decode")
        ]
        stack.push_async_callback(gateway.close)
        decode = ScriptedDecode(buses.pop(), script)
        decode.pause_at = position
        config = TokenizerConfig(model=(f"{MODEL}={folder}",))
        actors = [Tokenizer(config, bus) for bus in buses]
        for actor in (decode, *actors):
            await stack.enter_async_context(running(actor))
        await settle()
        outcome = Outcome()
        task = asyncio.create_task(said(gateway, outcome))
        if position >= 0:
            await asyncio.wait_for(decode.paused.wait(), 20)
            await settle(50)
            decode.pause_at = -1
            die(next(actor.bus for actor in actors if actor.bus.calls.active))
            decode.go_on.set()
        return await asyncio.wait_for(task, 10), outcome


@pytest.mark.parametrize("reply", [REPLY, CALL], ids=["text", "tool"])
async def test_a_tokenizer_may_die_at_any_token(tmp_path: Path, reply: str) -> None:
    folder = write_folder(tmp_path)
    script = [*byte_level().encode(reply).ids, EOS]
    undisturbed, _ = await with_a_death(folder, script, -1)
    due = shown(undisturbed)
    for position in range(0, len(script), 11):
        items, outcome = await with_a_death(folder, script, position)
        assert shown(items)[:3] == due[:3], position
        assert shown(items)[3] == due[3], position
        assert outcome.moves == 1
        assert outcome.end is not None
        assert outcome.end.status == ("tool_calls" if reply is CALL else "stop")
