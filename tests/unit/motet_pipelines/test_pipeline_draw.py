"""The drawing pipeline: a picture whose instance dies is finished elsewhere, and is the same picture."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import motet_diffusion.picture_stream
import motet_pipelines.images.draw
from motet_diffusion.service import Diffusion
from motet_media.pictures import to_file
from motet_pipelines.images.draw import Drawn, draw
from motet_shared.errors import DeadlineExceeded, Unavailable, WorkerLost
from motet_shared.testing import die, settle
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import SIZE
from support.stages.diffusion_stage import Caller, ReceivedItems, ask, stage, start

STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_checkpoints.stable_diffusion(
        tmp_path_factory.mktemp("sd") / "model", "ancestral"
    )


def serving(actors: list[Diffusion]) -> Diffusion:
    return next(actor for actor in actors if actor.bus.calls.active)


async def drawn_with_a_death(
    caller: Caller, actors: list[Diffusion], after: int, every: int, **files: Any
) -> ReceivedItems:
    """The picture of an instance that dies after a step, finished by another one."""
    seen, is_dead = ReceivedItems(), False
    request = ask(steps=STEPS, checkpoint_every=every)
    async with aclosing(draw(caller.bus, caller.store, request, seen.outcome, **files)) as strokes:
        async for stroke in strokes:
            seen.strokes.append(stroke)
            if stroke.step >= after and not is_dead:
                die(serving(actors).bus)
                is_dead = True
    return seen


@pytest.mark.parametrize("every", [0, 1, 4])
async def test_the_same_picture_when_the_instance_dies(folder: Path, every: int) -> None:
    async with stage(folder, 2) as (caller, actors, _):
        whole = await caller.draw(ask(steps=STEPS))
        passes = sum(actor.thread.engine.passes for actor in actors)
        assert passes == STEPS
        seen = await drawn_with_a_death(caller, actors, STEPS // 2, every)
        assert seen.outcome.moves == 1
        assert seen.outcome.data == whole.outcome.data
        steps = [stroke.step for stroke in seen.strokes]
        assert steps == sorted(set(steps))  # told once each
        (heir,) = [actor for actor in actors if actor.bus.control.connected]
        made = heir.thread.engine.passes - (STEPS if heir.thread.engine.passes > STEPS else 0)
        if every == 0:
            assert made == STEPS
        else:
            assert made <= STEPS // 2 + every


async def test_a_changed_picture_moves_too(folder: Path) -> None:
    files = {
        "image": to_file(Image.new("RGB", (SIZE, SIZE), "red")),
        "mask": to_file(Image.new("L", (SIZE, SIZE), 255)),
    }
    async with stage(folder, 2) as (caller, actors, _):
        whole = await caller.draw(ask(steps=STEPS), **files)
        seen = await drawn_with_a_death(caller, actors, 5, 2, **files)
        assert seen.outcome.moves == 1
        assert seen.outcome.data == whole.outcome.data


async def test_checkpoints_that_are_too_large_for_a_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motet_diffusion.picture_stream, "_MAX_INLINE", 100)
    monkeypatch.setattr(motet_pipelines.images.draw, "_INLINE", 100)
    async with stage(folder, 2) as (caller, actors, _):
        whole = await caller.draw(ask(steps=STEPS))
        seen = await drawn_with_a_death(caller, actors, STEPS // 2, 1)
        assert seen.outcome.data == whole.outcome.data
        kept = [stroke.checkpoint for stroke in seen.strokes if stroke.checkpoint]
        assert any(len(checkpoint.data) > 100 for checkpoint in kept), "came as a blob"


async def test_a_lone_instance_may_come_back(folder: Path) -> None:
    async with stage(folder) as (caller, actors, hub), AsyncExitStack() as later:
        whole = await caller.draw(ask(steps=STEPS))
        outcome = Drawn()
        task = asyncio.create_task(_all(caller, outcome))
        while not outcome.step:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        die(actors[0].bus)
        await asyncio.sleep(0.2)
        await start(hub, later, folder)
        await asyncio.wait_for(task, 60)
        assert outcome.data == whole.outcome.data


async def _all(caller: Caller, outcome: Drawn) -> None:
    request = ask(steps=STEPS, checkpoint_every=2)
    async with aclosing(draw(caller.bus, caller.store, request, outcome, patience=60.0)) as strokes:
        async for _ in strokes:
            pass


async def test_patience_and_deadline_end(folder: Path) -> None:
    async with stage(folder) as (caller, actors, _):
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(caller.draw(ask(steps=2000), deadline=0.3), 20)
        task = asyncio.create_task(caller.draw(ask(steps=2000), patience=0.3))
        while not actors[0].bus.calls.active:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        die(actors[0].bus)
        with pytest.raises((WorkerLost, Unavailable)):
            await asyncio.wait_for(task, 20)


async def test_leaving_is_a_remote_cancel(folder: Path) -> None:
    async with stage(folder) as (caller, (actor,), _):
        async with aclosing(draw(caller.bus, caller.store, ask(steps=2000))) as strokes:
            async for _ in strokes:
                break
        async with asyncio.timeout(20):
            while actor.bus.calls.active or actor.thread.engine.has_work:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await settle()
        assert not caller.bus.caller.streams
        actor.check_integrity()
        caller.store.check_integrity()
