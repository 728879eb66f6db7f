"""Signals to the process that scores documents, while it does: their client gets the scores all the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from motet_shared.wire.stream import Stream
from support.checkpoints.ranking_checkpoints import cross_encoder
from support.running.fork_server import ForkServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MODEL = "ranker"
PATIENT = 120.0  # seconds
TEXTS = ["ba be", "go ga . ma mi, mo", "a b c d e f g h i j k", "no yes sa"]
DOCUMENTS = [f"{TEXTS[number % 4]} " * (1 + number % 7) for number in range(600)]


@dataclass
class Rankers:
    """A gateway, and two processes that rank."""

    gateway: Gateway

    async def scores(self) -> list[float]:
        """Return the documents' scores in their order."""
        body = {"model": MODEL, "text_1": "ba be di", "text_2": DOCUMENTS}
        url = f"http://127.0.0.1:{self.gateway.port}/v1/score"
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENT) as http:
            answer = await http.post(url, json=body)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return [one["score"] for one in sorted(found, key=lambda one: one["index"])]

    async def ready(self, count: int) -> None:
        directory = self.gateway.bus.directory
        await directory.wait_for(lambda found: len(found.ready("ranking")) == count, PATIENT)

    async def strike(
        self, number: signal.Signals, scoring: asyncio.Task[list[float]]
    ) -> int | None:
        """Stop the process that scores, and send it the signal if it has not finished; its pid."""
        while (stream := self._stream()) is None:
            if scoring.done():
                return None
            await asyncio.sleep(0.001)
        beats = self.gateway.bus.directory.instances("ranking")
        pid = next(beat.pid for beat in beats if beat.instance == stream.instance)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.05)  # what it has sent arrives
        if stream.done:
            os.kill(pid, signal.SIGCONT)
            return None
        os.kill(pid, number)
        return pid

    def _stream(self) -> Stream | None:
        streams = self.gateway.bus.caller.streams.values()
        return next((one for one in streams if one.instance and not one.done), None)


@asynccontextmanager
async def rankers(folder: Path) -> AsyncIterator[Rankers]:
    config = GatewayConfig(port=0, patience=60.0)
    async with NatsServer() as nats, ForkServer("motet_embedding.ranking") as forks:
        gateway = Gateway(config, await nats.bus("gateway"))
        async with running(gateway):
            made = Rankers(gateway)
            argv = ("--role", "ranking", "--model", str(folder), "--name", MODEL, "--threads", "1")
            for _ in range(2):
                await forks.start(nats, "motet_embedding", *argv)
            await made.ready(2)
            yield made


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_ranker_costs_time_and_nothing_else(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with rankers(cross_encoder(tmp_path)) as made:
        undisturbed = await made.scores()
        assert len(set(undisturbed)) > 10
        for _ in range(20):
            scoring = asyncio.create_task(made.scores())
            struck = await made.strike(number, scoring)
            assert await scoring == pytest.approx(undisturbed, abs=1e-5)
            if struck is not None:
                break
        assert struck is not None, "too few documents for this machine"
        if number == signal.SIGSTOP:
            os.kill(struck, signal.SIGCONT)
            await made.ready(2)
        else:
            await made.ready(1)
        assert await made.scores() == pytest.approx(undisturbed, abs=1e-5)
        made.gateway.check_integrity()
