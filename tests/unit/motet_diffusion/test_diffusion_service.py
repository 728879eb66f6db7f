"""The diffusion service: pictures as they form, refusals, and callers that leave."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import motet_diffusion.picture_stream
from motet_media.pictures import to_file
from motet_shared.errors import BadRequest, MotetError, Overloaded, PayloadTooLarge, UnknownModel
from motet_shared.messages import Adapter, Draw
from motet_shared.testing import settle
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import SIZE
from support.running.refusals import refuses
from support.stages.diffusion_stage import ReceivedItems, ask, pixels, stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_checkpoints.stable_diffusion(
        tmp_path_factory.mktemp("sd") / "model", "ancestral"
    )


def image(colour: str = "red", size: tuple[int, int] = (SIZE, SIZE)) -> bytes:
    return to_file(Image.new("RGB", size, colour))


async def test_a_picture_with_previews(folder: Path) -> None:
    async with stage(folder) as (caller, (actor,), _):
        seen = await caller.draw(ask(previews=2, width=2 * SIZE))
        assert [stroke.step for stroke in seen.strokes] == [1, 2, 3, 4, 5, 6]
        assert {stroke.steps for stroke in seen.strokes} == {6}
        assert len(seen.previews) == 2
        assert all(pixels(preview).shape == (SIZE, 2 * SIZE, 3) for preview in seen.previews)
        assert seen.pixels.shape == (SIZE, 2 * SIZE, 3)
        assert (seen.outcome.width, seen.outcome.height, seen.outcome.steps) == (2 * SIZE, SIZE, 6)
        actor.check_integrity()
        assert (await caller.draw(ask(width=2 * SIZE))).outcome.data == seen.outcome.data
        assert (await caller.draw(ask(width=2 * SIZE, seed=8))).outcome.data != seen.outcome.data


async def test_previews_of_large_pictures_are_smaller(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(motet_diffusion.picture_stream, "_PREVIEW_SIDE", 8)
    async with stage(folder) as (caller, _, _):
        seen = await caller.draw(ask(previews=1, width=2 * SIZE))
        assert [pixels(preview).shape for preview in seen.previews] == [(4, 8, 3)]
        assert seen.pixels.shape == (SIZE, 2 * SIZE, 3)


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
async def test_formats(folder: Path, format: Any) -> None:
    async with stage(folder) as (caller, _, _):
        seen = await caller.draw(ask(format=format, quality=50, previews=1))
        assert [
            Image.open(BytesIO(data)).format for data in (seen.outcome.data, *seen.previews)
        ] == [format.upper()] * 2


async def test_pictures_are_changed(folder: Path) -> None:
    async with stage(folder) as (caller, (actor,), _):
        plain = await caller.draw(ask())
        changed = await caller.draw(ask(strength=0.5), image=image())
        assert changed.outcome.steps == 3
        assert (changed.pixels != plain.pixels).any()
        mask = Image.new("L", (SIZE, SIZE), 0)
        filled = await caller.draw(ask(strength=0.9), image=image(), mask=to_file(mask))
        assert (filled.pixels != changed.pixels).any()
        odd = await caller.draw(ask(strength=0.5), image=image(size=(21, 33)))
        assert (odd.outcome.width, odd.outcome.height) == (20, 32)
        actor.check_integrity()


@pytest.mark.parametrize(
    ("request_", "files", "error", "param"),
    [
        (
            Draw(model="other", prompt="x"),
            {},
            UnknownModel,
            "model",
        ),
        (
            ask("x" * 300),
            {},
            PayloadTooLarge,
            "prompt",
        ),
        (
            ask(width=30_000, height=30_000),
            {},
            PayloadTooLarge,
            "size",
        ),
        (
            ask(loras=[Adapter("ink")]),
            {},
            BadRequest,
            "loras[0].name",
        ),
        (ask(width=7), {}, BadRequest, "size"),
        (ask(steps=1 << 40), {}, BadRequest, "steps"),
        (ask(), {"mask": image()}, BadRequest, "mask"),
        (ask(), {"image": b"hello"}, BadRequest, "image"),
        (ask(), {"image": image()[:60]}, BadRequest, "image"),
        (
            ask(),
            {"image": image(size=(200, 200))},
            PayloadTooLarge,
            "image",
        ),
        (
            ask(),
            {"image": image(), "mask": image(size=(8, 8))},
            BadRequest,
            "mask",
        ),
    ],
)
async def test_refusals(
    folder: Path, request_: Draw, files: dict[str, bytes], error: type[MotetError], param: str
) -> None:
    async with stage(folder, longest_text=200) as (caller, (actor,), _):
        with refuses(error, param):
            await caller.draw(request_, **files)
        actor.check_integrity()
        assert not actor.thread.engine.passes


async def test_overload_is_refused_at_the_door(folder: Path) -> None:
    async with stage(folder, max_running=1, max_waiting=1) as (caller, (actor,), _):
        tasks = [asyncio.create_task(caller.draw(ask(steps=60))) for _ in range(3)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in done if not isinstance(result, ReceivedItems)] == [
            Overloaded
        ]
        drawn = [result.outcome.data for result in done if isinstance(result, ReceivedItems)]
        assert len(drawn) == 2
        assert drawn[0] == drawn[1]
        actor.check_integrity()


async def test_many_at_a_time_are_each_their_own(folder: Path) -> None:
    async with stage(folder) as (caller, (actor,), _):
        requests = [
            ask(f"picture {n}", seed=n, steps=20 + n, guidance_scale=float(n)) for n in range(5)
        ]
        alone = [(await caller.draw(request)).pixels for request in requests]
        passes = actor.thread.engine.passes
        together = await asyncio.gather(*(caller.draw(request) for request in requests))
        for one, other in zip(alone, together, strict=True):
            assert np.abs(one - other.pixels).max() <= 1
        assert actor.thread.engine.passes - passes < passes * 0.7


async def test_a_caller_that_leaves_stops_it_at_once(folder: Path) -> None:
    async with stage(folder) as (caller, (actor,), _):
        engine = actor.thread.engine
        async with caller.bus.open("diffusion", ask(steps=2000)) as stream:
            async for _batch in stream.batches():
                break
        async with asyncio.timeout(20):
            while engine.has_work or actor.bus.calls.active:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        passes = engine.passes
        await settle(50)
        assert engine.passes == passes < 1500
        actor.check_integrity()


async def test_a_caller_that_does_not_read_gets_the_picture_still(folder: Path) -> None:
    """Steps that it has no credit for are left out; the engine never waits for it."""
    async with stage(folder) as (caller, (actor,), _):
        async with caller.bus.open("diffusion", ask(steps=40, previews=3), window=2) as stream:
            async with asyncio.timeout(60):
                while not actor.thread.engine.pictures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            kinds = [type(item).__name__ async for batch in stream.batches() for item in batch]
        assert kinds == ["DenoisingProgress", "Picture"]


async def test_a_broken_engine_ends_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(folder) as (caller, (actor,), _):
        monkeypatch.setattr(actor.thread.engine.batcher, "take", lambda *_: 1 / 0)
        asking = asyncio.create_task(caller.draw(ask(), patience=0.1))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(actor.wait_crashed(), 10)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
