"""Lose what NATS has sent to a gateway together with its connection: what is under way is asked for again.

The gateway's connections are back before its next look at them. So it sees by the lost echoes alone
that answers may be lost, and by the services that calls have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from chaos.processes import Processes
from chaos.storm.stack import storm_stack
from chaos.storm.traffic import KINDS

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

SERVICES = (
    *("gateway", "tokenizer", "embedding", "vad", "asr", "tts"),
    *("thinker", "talker", "code2wav"),
)
HELD = 0.25  # seconds: in a tick of the monitor an echo is under way
WITHIN = 10.0  # seconds by which an answer may be later; it was 60
TIMES = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Processes, httpx.AsyncClient]]:
    folder: Path = tmp_path_factory.mktemp("lost-answers")
    async with (
        storm_stack(folder, SERVICES, of_each=1) as (stack, url),
        httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as http,
    ):
        yield stack, http


@pytest.mark.parametrize("kind", ["embedding", "speech", "transcript", "spoken"])
async def test_an_answer_that_was_lost_comes_again(
    kind: str, stack: tuple[Processes, httpx.AsyncClient]
) -> None:
    processes, http = stack
    line = processes.member("gateway-1").line
    ask = KINDS[kind][0]
    began = time.monotonic()
    due = await ask(http, 0, lambda _: None)
    usual = time.monotonic() - began
    for _ in range(TIMES):
        line.hold()
        asking = asyncio.create_task(ask(http, 0, lambda _: None))
        await asyncio.sleep(HELD)
        line.cut()
        async with asyncio.timeout(2 * usual + WITHIN):
            assert await asking == due
