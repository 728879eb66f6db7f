"""Cancel, death and move of every family of pictures and of videos, in processes of its own.

The families are the exact rows of docs/pictures.md. One for each form of a denoiser's calls is in
`make test-long`; all others are in `make extended PART=storm`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from motet_pipelines.images.draw import Drawn, draw
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Draw, Heartbeat
from motet_shared.testing import NatsServer
from motet_shared.wire.bus import Bus
from support.families import picture_families, video_families
from support.running import strikes
from support.running.fork_server import ForkServer
from support.stages.diffusion_stage import LOADED

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from list_pictures import PAGE, exact_rows  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
EXACT = exact_rows(PAGE.read_text())
# Tensors with rows; lists of rows; videos; those with sound.
COVERING = (
    "StableDiffusionPipeline",
    "ZImagePipeline",
    "WanPipeline",
    "LTX2Pipeline",
)
ROLE, TWO = "diffusion", 2
START_SECONDS = 120.0
STEPS, SIDE = 60, 128  # enough for a picture to be struck while it is drawn
# Steps that a kind can have at most, or that take seconds with long texts; and pixels per side.
_FEWER = {
    "LatentConsistency": (50, 256),
    "LTX2": (24, 64),
    "HunyuanVideo": (24, 64),
    "WanImage": (40, 64),
}
Strike = Callable[["World", str], Awaitable[None]]


@dataclass
class World:
    """A caller and the processes of a family, on one NATS server."""

    nats: NatsServer
    forks: ForkServer
    bus: Bus
    store: BlobStore

    async def begin(self, family: str, folder: Path, count: int) -> None:
        """Start processes, and wait until two of the family are ready."""
        name = model_name(family)
        flags = ("--model", str(folder), "--name", name, "--threads", "1", "--max-steps", "2000")
        for _ in range(count):
            await self.forks.start(self.nats, "motet_diffusion", *flags)
        await self.bus.directory.wait_for(
            lambda found: len(found.ready(ROLE, model=name)) == TWO, START_SECONDS
        )

    def beat(self, instance: str) -> Heartbeat:
        beats = self.bus.directory.instances(ROLE)
        return next(beat for beat in beats if beat.instance == instance)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[World]:
    async with NatsServer() as nats, ForkServer(*LOADED) as forks:
        bus = await nats.bus("gateway")
        try:
            async with BlobStore(bus.instance, 64 << 20) as store:
                yield World(nats, forks, bus, store)
        finally:
            await bus.close()


def cases() -> list[Any]:
    return [
        pytest.param(
            name, marks=pytest.mark.long if name in COVERING else pytest.mark.extended("storm")
        )
        for name in [*EXACT, *video_families.NAMES]
    ]


@pytest.mark.parametrize("family", cases())
async def test_every_family_survives_leaving_moving_and_death(
    processes: World, family: str, tmp_path: Path
) -> None:
    """What is left is freed; what loses its instance goes on at the other one, to equal bytes."""
    families = video_families if family in video_families.NAMES else picture_families
    folder = families.write(family, tmp_path / "model")
    await processes.begin(family, folder, TWO)
    whole, instances = await drawn(processes, family)
    assert len(instances) == 1
    left, _ = await drawn(processes, family, leaves=True)
    await strikes.idle(processes.bus.directory, [str(left.instance)])
    for strike in (send_away, kill):
        struck, instances = await drawn(processes, family, strike)
        assert len(instances) == TWO
        assert struck.data == whole.data
        await processes.begin(family, folder, 1)
    await processes.forks.end_all()


async def drawn(
    world: World, family: str, strike: Strike | None = None, *, leaves: bool = False
) -> tuple[Drawn, set[str | None]]:
    """Draw a picture; after some of its steps strike its instance, or leave.

    Returns what was drawn, and the instances that drew it.
    """
    outcome, files, instances = Drawn(), dict[str, bytes](), set[str | None]()
    is_video = family in video_families.NAMES
    kinds = video_families.kinds_of(family) if is_video else EXACT[family].kinds
    if "draw" not in kinds:
        files["image"] = _file("RGB")
        if "change" not in kinds:
            files["mask"] = _file("L")
    steps, side = next(
        (few for name, few in _FEWER.items() if family.startswith(name)), (STEPS, SIDE)
    )
    request = Draw(
        model=model_name(family),
        prompt="a red circle",
        seed=5,
        width=side,
        height=side,
        steps=steps,
        strength=1.0,
        checkpoint_every=2,
        format="mp4" if is_video else "png",
        seconds=0.1 if is_video else 0.0,
    )
    strokes = draw(world.bus, world.store, request, outcome, patience=60.0, **files)  # type: ignore[arg-type]
    async with asyncio.timeout(120), aclosing(strokes):
        async for stroke in strokes:
            instances.add(outcome.instance)
            if stroke.step >= 4 and leaves:
                break
            if stroke.step >= 4 and strike is not None:
                await strike(world, str(outcome.instance))
                strike = None
    instances.add(outcome.instance)
    return outcome, instances


def model_name(family: str) -> str:
    return family.replace(" ", "-")


def _file(mode: str) -> bytes:
    out = BytesIO()
    Image.new(mode, (64, 64), "white").save(out, "PNG")
    return out.getvalue()


async def send_away(world: World, instance: str) -> None:
    await strikes.send_away(world.bus.directory, world.beat(instance))


async def kill(world: World, instance: str) -> None:
    strikes.kill(world.beat(instance))
