"""A worker whose model is computed by two processes: what it answers, and what a dead or stopped rank does to it.

The group ends with a reason and within its deadline, and the worker with it: no stream waits for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

PATIENT = 240.0
WAITS = "60"  # seconds that a rank waits for another one
BRIEFLY = "10"  # where one is stopped
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
            if child.name().startswith("motet-rank-")
        ]

    async def answer(self, length: int) -> list[int]:
        sampling = Sampling(temperature=0, max_tokens=length, ignore_eos=True)
        request = Generate(model="tiny", prompt=PROMPT, sampling=sampling)
        async with self.bus.open("decode", request) as stream:
            return [
                token async for body in stream if isinstance(body, Tokens) for token in body.ids
            ]

    async def computing(self) -> None:
        """Wait until a heartbeat tells of a running request."""
        await self._until(
            lambda: any(b.load.get("running") for b in self.bus.directory.instances("decode"))
        )

    async def ready(self) -> None:
        def serves() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            beats = self.bus.directory.ready("decode", model="tiny")
            return any(beat.pid == self.process.pid for beat in beats)

        await self._until(serves)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENT):
            while not condition():  # noqa: ASYNC110  # heartbeats and processes change it
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    path.mkdir()
    return tiny_checkpoint("llama", path, max_position_embeddings=8192)


@asynccontextmanager
async def worker(folder: Path, tmp_path: Path, *options: str) -> AsyncIterator[Worker]:
    argv = [sys.executable, "-m", "motet_llm", "--model", str(folder), "--threads", "2"]
    argv += ["--max-running", "8", "--collective-timeout", WAITS, *options]
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
            await asyncio.to_thread(process.wait, PATIENT)
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
        for rank in ranks:
            await asyncio.to_thread(rank.wait, PATIENT)


@pytest.mark.parametrize(
    ("blow", "waits", "reason"),
    [(signal.SIGKILL, WAITS, "SIGKILL"), (signal.SIGSTOP, BRIEFLY, "collective_timeout")],
)
async def test_a_rank_that_is_lost_ends_the_worker_with_a_reason(
    blow: signal.Signals, waits: str, reason: str, folder: Path, tmp_path: Path
) -> None:
    options = ("--tensor-parallel", "2", "--collective-timeout", waits)
    async with worker(folder, tmp_path, *options) as group:
        (rank,) = group.ranks
        asked = asyncio.create_task(group.answer(LONG))
        await group.computing()
        assert not asked.done()
        rank.send_signal(blow)
        with pytest.raises(MotetError):
            await asked
        await asyncio.to_thread(group.process.wait, PATIENT)
        assert group.process.returncode != 0
        await asyncio.to_thread(rank.wait, PATIENT)
    assert reason in group.log.read_text()


async def test_a_rank_that_dies_while_nothing_is_computed_ends_the_worker(
    folder: Path, tmp_path: Path
) -> None:
    async with worker(folder, tmp_path, "--tensor-parallel", "2") as group:
        await group.answer(4)
        group.ranks[0].kill()
        await asyncio.to_thread(group.process.wait, PATIENT)
        assert "SIGKILL" in group.log.read_text()


@contextmanager
def killed_as_they_start(parent: int) -> Iterator[None]:
    """Kill each new rank among the descendants of a process."""
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            with suppress(psutil.Error):
                for child in psutil.Process(parent).children(recursive=True):
                    if child.name().startswith("motet-rank-"):
                        child.kill()
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        over.set()
        killer.join()


@contextmanager
def one_killed_in_its_start(parent: int, delay: float) -> Iterator[list[int]]:
    """Stop the first new rank among the descendants of a process, `delay` seconds after it appears.

    It is killed a second later, when the others wait for it. Yields a list to which its process id
    is added.
    """
    over, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not over.wait(0.002) and not killed:
            with suppress(psutil.Error):
                for child in psutil.Process(parent).children(recursive=True):
                    if child.name().startswith("motet-rank-"):
                        over.wait(delay)
                        child.suspend()
                        over.wait(1.0)
                        child.kill()
                        killed.append(child.pid)
                        break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join()


@pytest.mark.parametrize(
    ("delay", "options"),
    [
        (0.0, ("--tensor-parallel", "2")),
        (0.02, ("--tensor-parallel", "2", "--rank-memory", "false")),
        (0.02, ("--pipeline-parallel", "2")),
        (0.08, ("--tensor-parallel", "2")),
    ],
)
async def test_a_rank_that_dies_in_its_start_is_noticed_at_once(
    delay: float, options: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """Nothing waits for `--collective-timeout`: the group is formed again, and serves."""
    late = ("--collective-timeout", str(PATIENT))
    for wait in (delay, delay / 2, delay / 4):  # until the start is still going on by then
        began = time.monotonic()
        with one_killed_in_its_start(os.getpid(), wait) as killed:
            async with worker(folder, tmp_path, *options, *late) as group:
                assert time.monotonic() - began < PATIENT / 2
                (rank,) = group.ranks
                assert rank.pid not in killed
                assert len(await group.answer(8)) == 8
        if killed:
            return
    pytest.fail(f"the start was over {wait} s after the rank had appeared")


async def test_a_group_without_ranks_to_spare_is_smaller_and_says_the_same(
    folder: Path, tmp_path: Path
) -> None:
    options = ("--tensor-parallel", "2", "--deterministic")
    async with worker(folder, tmp_path, *options) as group:
        assert len(group.ranks) == 1
        expected = await group.answer(60)
    with killed_as_they_start(os.getpid()):
        async with worker(folder, tmp_path, *options) as alone:
            assert not alone.ranks
            assert await alone.answer(60) == expected
    assert "a smaller group is formed" in alone.log.read_text()


async def test_ranks_end_with_their_leader(folder: Path, tmp_path: Path) -> None:
    async with worker(folder, tmp_path, "--tensor-parallel", "2") as group:
        (rank,) = group.ranks
        group.process.kill()
        await asyncio.to_thread(rank.wait, PATIENT)
