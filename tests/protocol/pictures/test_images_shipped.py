"""Pictures by the model that ships: the official client, the gateway, a real nats-server and models/pocket-draw."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from motet_diffusion.config import DiffusionConfig
from motet_diffusion.service import Diffusion
from motet_media.pictures import to_file
from support.stages.diffusion_stage import pixels
from support.stages.served_gateway import Served, served

MODEL = "pocket-draw"
FOLDER = Path(__file__).parents[3] / "models" / MODEL
SIDE = 64
OURS = {"seed": 7, "steps": 4, "strength": 0.6}
PROMPT = "a red circle"


@pytest.fixture
async def stack() -> AsyncIterator[Served]:
    config = DiffusionConfig(model=str(FOLDER), name=MODEL, metrics_port=-1)
    async with served("diffusion", lambda bus: Diffusion(config, bus)) as (gateway, _):
        yield Served(gateway)


def picture(color: str = "blue") -> bytes:
    return to_file(Image.new("RGB", (SIDE, SIDE), color))


def two_squares() -> bytes:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    for left in (10, SIDE // 2 + 10):
        image.paste("blue", (left, 26, left + 12, 38))
    return to_file(image)


def left_half_open() -> bytes:
    mask = Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, SIDE // 2, SIDE))
    return to_file(mask)


async def edited(
    client: openai.AsyncOpenAI, ours: dict[str, Any] | None = None, **fields: Any
) -> list[bytes]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "image": ("a.png", picture()),
        **fields,
    }
    answer = await client.images.edit(**body, extra_body={**OURS, **(ours or {})})
    return [base64.b64decode(one.b64_json or "") for one in answer.data or []]


async def test_a_picture_is_edited(stack: Served) -> None:
    async with stack.client() as client:
        (one,) = await edited(client)
        assert pixels(one).shape == (SIDE, SIDE, 3)
        assert [one] == await edited(client)  # the same seed, the same picture
        assert [one] != await edited(client, {"seed": 8})
        (light,) = await edited(client, {"strength": 0.3})
        assert light != one
        two = await edited(client, n=2)
        assert len(set(two)) == 2
        assert abs(pixels(two[0]).astype(int) - pixels(one)).max() <= 2


async def test_only_what_the_mask_opens_is_changed(stack: Served) -> None:
    async with stack.client() as client:
        base = two_squares()
        filled, kept = [
            (await edited(client, {"strength": 1.0}, image=("a.png", base), mask=("m.png", mask)))[
                0
            ]
            for mask in (left_half_open(), to_file(Image.new("RGBA", (SIDE, SIDE), (0, 0, 0, 255))))
        ]
    change = abs(pixels(filled) - pixels(kept)).mean(axis=(0, 2))
    # The decoder looks at the whole picture, so that what is kept changes its tone a little.
    assert change[: SIDE // 2].mean() > 1.5 * change[SIDE // 2 + 8 :].mean()
    red, _, blue = pixels(filled)[30:34, SIDE // 2 + 14 : SIDE // 2 + 18].mean(axis=(0, 1))
    assert blue > red + 80


async def test_an_edit_is_streamed(stack: Served) -> None:
    async with stack.client() as client:
        (whole,) = await edited(client)
        stream: Any = await client.images.edit(
            model=MODEL,
            prompt=PROMPT,
            image=("a.png", picture()),
            stream=True,
            partial_images=1,
            extra_body=OURS,
        )
        events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert base64.b64decode(events[-1].b64_json) == whole


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_variations_are_not_served(stack: Served) -> None:
    async with stack.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await asyncio.wait_for(client.images.create_variation(image=("a.png", picture())), 30)
    assert caught.value.status_code in (404, 405)
