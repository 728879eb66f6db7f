"""The tokenizer as a process of its own on a real nats-server, under the permissions of its role."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet_shared.messages import Sampling, Text
from motet_shared.testing import NatsServer, running
from motet_shared.wire.bus import Bus
from support.checkpoints.tiny_tokenizers import write_folder
from support.running.service_process import end, start
from support.services.scripted_decode import MODEL, ScriptedDecode
from support.stages.tokenizer_stage import REPLY, SCRIPT, Answer, chat


@pytest.fixture
async def nats() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


async def ask(gateway: Bus) -> Answer:
    answer = Answer()
    async with gateway.open("tokenizer", chat(sampling=Sampling(seed=3, logprobs=0))) as stream:
        async for item in stream:
            assert isinstance(item, Text)
            answer.items.append(item)
    answer.end = stream.end or answer.end
    return answer


async def test_a_process_serves_and_moves_and_drains(nats: NatsServer, tmp_path: Path) -> None:
    process = await start(nats, "motet_tokenizer", "--model", f"{MODEL}={write_folder(tmp_path)}")
    gateway = await nats.bus("gateway")
    try:
        await gateway.directory.wait_for(lambda d: d.ready("tokenizer", model=MODEL), 30)
        first = ScriptedDecode(await nats.bus("decode"), SCRIPT)
        async with running(first):
            first.pause_at = 5
            asking = asyncio.create_task(ask(gateway))
            await asyncio.wait_for(first.paused.wait(), 30)
        # The first instance is gone without a word about this stream; the next one appears later.
        second = ScriptedDecode(await nats.bus("decode"), SCRIPT)
        async with running(second):
            answer = await asyncio.wait_for(asking, 30)
            assert (answer.text, answer.ids, answer.end.status) == (REPLY, SCRIPT, "stop")
            assert second.requests[0].output == SCRIPT[:5]
            assert (await ask(gateway)).text == REPLY
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        await end(process)
        await gateway.close()
