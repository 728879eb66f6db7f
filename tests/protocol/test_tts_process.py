"""A speech worker as a process of its own on a real nats-server, under the permissions of its role; and its death."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

import tts_checkpoints
from motet_shared.testing import NatsServer, running
from motet_tts.service import Tts
from tts_stage import MODEL, TEXT, Speech, ask, config, said

pytestmark = pytest.mark.slow


async def tts_process(nats: NatsServer, folder: Path) -> asyncio.subprocess.Process:
    argv = ["--model", str(folder), "--name", MODEL, "--first-chunk", "0.002", "--chunk", "0.01", "--threads", "1"]
    argv += ["--nats-url", nats.url, "--metrics-port", "-1", "--stop-with-parent"]
    env = {**os.environ, "MOTET_NATS_PASSWORD": nats.password, "PYTHONPATH": os.pathsep.join(sys.path)}
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "motet_tts", *argv, env=env)


def nearly_equal(one: Speech, other: Speech) -> bool:
    """Processes may add floats in another order: a step or two of 16 bits."""
    values = (memoryview(speech.pcm).cast("h") for speech in (one, other))
    return len(one.pcm) == len(other.pcm) and max(abs(a - b) for a, b in zip(*values, strict=True)) <= 4


async def test_a_process_serves_and_another_instance_goes_on(tmp_path: Path) -> None:
    folder = tts_checkpoints.pocket_tts(tmp_path / "model", sample=True, threshold=0.2)
    request = ask(TEXT * 12)
    async with NatsServer() as nats:
        process = await tts_process(nats, folder)
        gateway = await nats.bus("gateway")
        try:
            await gateway.directory.wait_for(lambda d: d.ready("tts", model=MODEL), 60)
            task = asyncio.create_task(said(gateway, request))
            while not any(stream.received > 5 for stream in gateway.caller.streams.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            process.kill()
            async with running(Tts(config(folder), await nats.bus("tts"))):
                moved = await asyncio.wait_for(task, 60)
                whole = await said(gateway, request)
            assert moved.outcome.moves == 1
            assert [word for word, _, _ in whole.words] == request.text.split()
            assert nearly_equal(moved, whole)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await gateway.close()
