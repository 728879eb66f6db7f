"""Diffusion workers as processes of their own, under the permissions of their role; and kill -9 in mid-picture."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from motet_shared.blobs.store import BlobStore
from motet_shared.testing import NatsServer
from support.checkpoints import diffusion_checkpoints
from support.running.fork_server import ForkServer
from support.stages.diffusion_stage import LOADED, MODEL, Caller, ask, flags

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]


async def test_a_killed_workers_picture_is_finished_elsewhere(tmp_path: Path) -> None:
    """With the same bytes, and without the steps that were done."""
    folder = diffusion_checkpoints.stable_diffusion(tmp_path / "model", "ancestral")
    request = ask(steps=120, checkpoint_every=5)
    async with NatsServer() as nats, ForkServer(*LOADED) as forks, AsyncExitStack() as stack:
        gateway = await nats.bus("gateway")
        stack.push_async_callback(gateway.close)
        store = await stack.enter_async_context(BlobStore(gateway.instance, 1 << 20))
        workers = {}
        for name in ("diffusion-one", "diffusion-two"):
            workers[name] = await forks.start(
                nats, "motet_diffusion", *flags(folder), "--instance", name
            )
        await gateway.directory.wait_for(lambda d: len(d.ready("diffusion", model=MODEL)) == 2, 120)
        caller = Caller(gateway, store)
        whole = await caller.draw(request)
        task = asyncio.create_task(caller.draw(request))
        while not any(stream.received > 40 for stream in gateway.caller.streams.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        (busy,) = [stream.instance for stream in gateway.caller.streams.values()]
        os.kill(workers[str(busy)], signal.SIGKILL)
        moved = await asyncio.wait_for(task, 120)
        assert moved.outcome.moves == 1
        assert moved.outcome.instance != busy
        assert moved.outcome.data == whole.outcome.data
        steps = [stroke.step for stroke in moved.strokes]
        assert steps == list(range(1, 121))
