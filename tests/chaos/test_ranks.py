"""A worker whose model is computed by two processes: what it answers, and what a dead or stopped rank does to it.

The group ends with a reason and within its deadline, and the worker with it: no stream waits for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from motet_shared.errors import MotetError
from motet_shared.messages import Generate, Sampling, Tokens
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.service_process import settings

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TIMEOUT = 3.0  # seconds that a rank waits for another one
PATIENT = 120.0
LONG = 4000  # tokens of a reply that does not end before the rank does
PROMPT = [(7 * i * i + i) % 250 for i in range(40)]


@dataclass
class Worker:
    bus: Bus  # a tokenizer's
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ranks(self) -> list[psutil.Process]:
        """The other ranks of the group."""
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if "motet_llm.parallel" in child.cmdline()
        ]

    async def answer(self, length: int) -> list[int]:
        sampling = Sampling(temperature=0, max_tokens=length, ignore_eos=True)
        request = Generate(model="tiny", prompt=PROMPT, sampling=sampling)
        async with self.bus.open("decode", request) as stream:
            return [
                token async for body in stream if isinstance(body, Tokens) for token in body.ids
            ]

    async def ready(self) -> None:
        def found() -> str | None:
            assert self.process.poll() is None, self.log.read_text()
            beats = self.bus.directory.ready("decode", model="tiny")
            return next((b.instance for b in beats if b.pid == self.process.pid), None)

        await self.bus.directory.wait_for(lambda _: found(), PATIENT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    path.mkdir()
    return tiny_checkpoint("llama", path, max_position_embeddings=8192)


@asynccontextmanager
async def worker(folder: Path, tmp_path: Path, *options: str) -> AsyncIterator[Worker]:
    argv = [sys.executable, "-m", "motet_llm", "--model", str(folder), "--threads", "2"]
    argv += ["--max-running", "8", "--collective-timeout", str(TIMEOUT), *options]
    log = tmp_path / "log"
    async with NatsServer() as nats:
        bus = await nats.bus("tokenizer")
        env = os.environ | settings(nats)
        process = _start(argv, env, log)
        found = Worker(bus, process, log)
        try:
            await found.ready()
            yield found
        finally:
            if process.poll() is None:
                process.terminate()
            await asyncio.to_thread(process.wait, 60)
            await bus.close()


def _start(argv: list[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(argv, env=env, stderr=file, stdout=file)


async def test_two_processes_answer_as_one_does(folder: Path, tmp_path: Path) -> None:
    async with worker(folder, tmp_path) as alone:
        expected = await alone.answer(60)
    for options in (("--tensor-parallel", "2"), ("--pipeline-parallel", "2")):
        async with worker(folder, tmp_path, *options) as group:
            assert len(group.ranks) == 1
            assert await group.answer(60) == expected
            ranks = group.ranks
        assert group.process.returncode == 0
        assert not any(rank.is_running() for rank in ranks)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_rank_that_is_lost_ends_the_worker_with_a_reason(
    blow: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    async with worker(folder, tmp_path, "--tensor-parallel", "2") as group:
        (rank,) = group.ranks
        asked = asyncio.create_task(group.answer(LONG))
        await asyncio.sleep(1)
        assert not asked.done()
        struck = time.monotonic()
        rank.send_signal(blow)
        with pytest.raises(MotetError):
            await asked
        await asyncio.to_thread(group.process.wait, 60)
        assert time.monotonic() - struck < TIMEOUT + 20
        assert group.process.returncode != 0
        assert not rank.is_running()
    log = group.log.read_text()
    assert ("SIGKILL" if blow is signal.SIGKILL else "collective_timeout") in log


async def test_a_rank_that_dies_while_nothing_is_computed_ends_the_worker(
    folder: Path, tmp_path: Path
) -> None:
    async with worker(folder, tmp_path, "--tensor-parallel", "2") as group:
        await group.answer(4)
        group.ranks[0].kill()
        await asyncio.to_thread(group.process.wait, 60)
        assert "SIGKILL" in group.log.read_text()


async def test_ranks_end_with_their_leader(folder: Path, tmp_path: Path) -> None:
    async with worker(folder, tmp_path, "--tensor-parallel", "2") as group:
        (rank,) = group.ranks
        group.process.kill()
        await asyncio.to_thread(rank.wait, 30)
