"""A speech worker as a process of its own on a real nats-server, under the permissions of its role; and its death."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from motet_shared.testing import NatsServer, running
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.running.service_process import end, start
from support.stages.tts_stage import MODEL, TEXT, Speech, ask, config, said

pytestmark = [pytest.mark.long, pytest.mark.slow]


def settings(folder: Path) -> tuple[str, ...]:
    return (
        "--model",
        str(folder),
        "--name",
        MODEL,
        "--first-chunk",
        "0.002",
        "--chunk",
        "0.01",
        "--threads",
        "1",
    )


def nearly_equal(one: Speech, other: Speech) -> bool:
    """Processes may add floats in another order: a step or two of 16 bits."""
    values = (memoryview(speech.pcm).cast("h") for speech in (one, other))
    return (
        len(one.pcm) == len(other.pcm)
        and max(abs(a - b) for a, b in zip(*values, strict=True)) <= 4
    )


async def test_a_process_serves_and_another_instance_goes_on(tmp_path: Path) -> None:
    folder = tts_checkpoints.pocket_tts(tmp_path / "model", sample=True, threshold=0.2)
    request = ask(TEXT * 12)
    async with NatsServer() as nats:
        process = await start(nats, "motet_tts", *settings(folder))
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
            await end(process)
            await gateway.close()
