"""pocket-chat, pocket-draw and pocket-embed as `make run` starts them, with the official client and on the page.

Pictures are right, a conversation draws one, looks at it and talks about it, and texts that say the same are near.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from playwright.async_api import expect

from e2e.browser.browser import browsing, eventually, send, set_seed
from e2e.stack import MotetStack
from recipes.draw.check import check, detect_things
from recipes.world.pictures import SIZE, Picture
from recipes.world.scenes import Scene, Thing

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("pocket"),
]

CHAT, DRAW, EMBED = "pocket-chat", "pocket-draw", "pocket-embed"
SEED = 3  # pocket-draw is not always right, nor pocket-chat about it (models/README.md)
WORDS = {1: "one", 2: "two", 3: "three", 4: "four"}
CIRCLES, SQUARE = (
    Thing(shape="circle", colour="red"),
    Thing(shape="square", colour="blue", column=2, row=2),
)
ASKED = {
    "two red circles and a blue square": Scene(
        things=(CIRCLES, Thing(shape="circle", colour="red", column=1), SQUARE)
    ),
    "A green triangle to the left of a yellow star.": Scene(
        things=(
            Thing(shape="triangle", colour="green"),
            Thing(shape="star", colour="yellow", column=1),
        )
    ),
    "From top to bottom: a large black square and a small orange circle.": Scene(
        things=(
            Thing(shape="square", colour="black", size="large"),
            Thing(shape="circle", colour="orange", size="small", row=1),
        )
    ),
}


@pytest.fixture
def client(pocket: MotetStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{pocket.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def pixels(data: str) -> Picture:
    """Of base64, with or without what a data URI begins with."""
    file = BytesIO(base64.b64decode(data.rpartition(",")[2]))
    return np.asarray(Image.open(file).convert("RGB"))


def test_what_is_asked_for_is_on_the_picture(client: openai.OpenAI) -> None:
    right = []
    for prompt, scene in ASKED.items():
        reply = client.images.generate(
            model=DRAW,
            prompt=prompt,
            n=2,
            response_format="b64_json",
            extra_body={"seed": 7},
            size="auto",
        )
        pictures = [pixels(one.b64_json or "") for one in reply.data or ()]
        assert [picture.shape for picture in pictures] == [(SIZE, SIZE, 3)] * 2
        right += [check(picture, scene).correct for picture in pictures]
    assert sum(right) >= len(right) - 1, right  # models/README.md tells how often it is


def test_a_picture_is_drawn_looked_at_and_talked_about(client: openai.OpenAI) -> None:
    tool: Any = {"type": "image_generation"}
    talk: list[Any] = [{"role": "user", "content": "Draw two red circles and a blue square."}]
    ask: dict[str, Any] = {"model": CHAT, "tools": [tool], "temperature": 0, "seed": SEED}
    said = client.chat.completions.create(messages=talk, **ask).choices[0].message
    [drawn] = (said.model_extra or {})["images"]
    assert drawn["revised_prompt"] == "two red circles and a blue square"
    things = detect_things(pixels(drawn["image_url"]["url"])).things
    assert len(things) >= 2
    for thing in things:
        assert thing.kind.phrase() in (said.content or "")
    talk += [
        said.model_dump(exclude_none=True),
        {"role": "user", "content": "How many things are there?"},
    ]
    answer = client.chat.completions.create(messages=talk, **ask).choices[0].message.content or ""
    assert WORDS[len(things)] in answer.lower()


def test_the_same_told_differently_is_nearer_than_something_else(client: openai.OpenAI) -> None:
    texts = [
        "From left to right: a red circle and a blue square.",
        "a blue square to the right of a red circle",
        "From left to right: a red circle and a green square.",
        "They began to talk about the weather.",
    ]
    found = client.embeddings.create(model=EMBED, input=texts)
    vectors = np.array([one.embedding for one in found.data])
    near = vectors[1:] @ vectors[0]
    assert near[0] > near[1] > near[2]


@pytest.mark.asyncio
async def test_on_the_page_it_draws_and_knows_what_it_drew(
    pocket: MotetStack, tmp_path: Path
) -> None:
    async with browsing(pocket.url) as page:
        await set_seed(page, SEED)
        await send(page, "Draw two red circles and a blue square.")
        await expect(page.locator("article.assistant img")).to_have_attribute(
            "alt", "two red circles and a blue square"
        )
        assert (
            await eventually(page, "document.querySelector('article.assistant img').naturalWidth")
            == SIZE
        )
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        drawn = await page.locator("article.assistant img").get_attribute("src")
        await send(page, "How many things are there?")
        number = WORDS[
            len(detect_things(pixels(drawn or "")).things)
        ]  # on the picture, whatever was asked for
        await expect(page.locator("article.assistant > .text").last).to_contain_text(
            number, ignore_case=True
        )
        await page.screenshot(path=tmp_path / "drawn.png")
