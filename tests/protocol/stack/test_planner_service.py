"""The planner on a real nats-server, under the permissions of its role: from nothing to the first token and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet_planner.config import PlannerConfig
from motet_planner.service import Planner
from motet_shared.messages import ListTargets, ScalingTarget, Text
from motet_shared.testing import NatsServer, free_port, running
from motet_shared.wire.bus import Bus
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints.tiny_tokenizers import write_folder
from support.running.service_process import end, start
from support.services.scripted_decode import MODEL, ScriptedDecode
from support.stages.tokenizer_stage import REPLY, SCRIPT, chat

ROLES = """
[decode]
min = 0
max = 2
target = 4
window = 1
burst_window = 0.5
scale_down_delay = 0.5
cold_start = 0.5
"""


@pytest.fixture
async def nats() -> AsyncIterator[NatsServer]:
    async with NatsServer() as server:
        yield server


class Place:
    """An actuator that starts decode instances here, each after a moment."""

    def __init__(self, nats: NatsServer):
        self._nats = nats
        self.running: list[contextlib.AsyncExitStack] = []
        self.requested: list[int] = []

    async def count(self, name: str) -> int | None:
        return len(self.running)

    async def scale(self, name: str, count: int) -> None:
        self.requested.append(count)
        while len(self.running) < count:
            await asyncio.sleep(0.3)
            stack = contextlib.AsyncExitStack()
            await stack.enter_async_context(
                running(ScriptedDecode(await self._nats.bus("decode"), SCRIPT))
            )
            self.running.append(stack)
        while len(self.running) > count:
            await self.running.pop().aclose()

    async def close(self) -> None:
        await self.scale("decode", 0)


async def told(operator: Bus) -> ScalingTarget:
    async with operator.open("planner", ListTargets()) as stream:
        (found,) = [item async for item in stream]
    assert isinstance(found, ScalingTarget)
    return found


async def test_the_first_request_waits_for_the_first_instance(
    nats: NatsServer, tmp_path: Path
) -> None:
    (tmp_path / "roles.toml").write_text(ROLES)
    place = Place(nats)
    settings: dict[str, Any] = {"roles": tmp_path / "roles.toml", "interval": 0.2}
    config = nats.config("planner", PlannerConfig, **settings)
    planner = Planner(config, await nats.bus("planner"), place)  # type: ignore[arg-type]
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = TokenizerConfig(model=(f"{MODEL}={write_folder(folder)}",), decode_wait=60.0)
    tokenizer = Tokenizer(config, await nats.bus("tokenizer"))
    gateway, operator = await nats.bus("gateway"), await nats.bus("operator")
    async with running(tokenizer), running(planner):
        await operator.directory.wait_for(lambda d: d.ready("planner"), 30)
        await gateway.directory.wait_for(lambda d: d.ready("tokenizer", model=MODEL), 30)
        text = ""
        async with gateway.open("tokenizer", chat()) as stream:
            async for item in stream:
                assert isinstance(item, Text)
                text += item.text
        assert text == REPLY
        assert max(place.requested) == 1
        async with asyncio.timeout(60):
            while (wanted := await told(operator)).target or place.running:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (wanted.group, wanted.role) == ("decode", "decode")
        assert wanted.cold_start > 0, "measured on the one that was started"
        assert wanted.demand["steady"] == 0
    await gateway.close()
    await operator.close()


async def test_a_process_tells_and_ends(nats: NatsServer, tmp_path: Path) -> None:
    """As it comes: it looks after decode and tokenizers, and only tells what it would do."""
    port = free_port()
    process = await start(nats, "motet_planner", "--metrics-port", str(port), "--interval", "0.2")
    operator = await nats.bus("operator")
    try:
        await operator.directory.wait_for(lambda d: d.ready("planner"), 60)
        async with running(ScriptedDecode(await nats.bus("decode"), SCRIPT)):
            async with asyncio.timeout(60):
                while not (await _groups(operator)).get("decode", (0, 0))[1]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert await _groups(operator) == {"decode": (1, 1), "tokenizer": (1, 0)}
            url = f"http://127.0.0.1:{port}/metrics"
            metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
            assert "motet_target_instances{" in metrics
            assert 'kind="decode"' in metrics
            answer = json.loads(
                await operator.control.request("$SRV.STATS.motet-planner", b"", timeout=10)
            )
            assert answer["endpoints"][0]["data"]["target_instances"] == {
                "decode": 1,
                "tokenizer": 1,
            }
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        await end(process)
        await operator.close()


async def _groups(operator: Bus) -> dict[str, tuple[int, int]]:
    """(target, ready) by group, as of the last look."""
    async with operator.open("planner", ListTargets()) as stream:
        return {
            item.group: (item.target, item.ready)
            async for item in stream
            if isinstance(item, ScalingTarget)
        }
