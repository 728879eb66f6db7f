"""Pictures on the page, in a headless browser: dropped, chosen, drawn while one looks on, and asked about."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from PIL import Image
from playwright.async_api import Page, expect

from e2e.browser.browser import browsing, eventually, send, set_seed
from e2e.stack import START_SECONDS, fetch, until
from motet_diffusion.service import Diffusion
from motet_shared.messages import ModelCard, Text
from motet_shared.testing import NatsServer, free_port, running
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import SIZE
from support.running.service_process import service_process
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer, tool_call, words
from support.stages.diffusion_stage import config

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

PROMPT = "two red circles"
_DROP = """(data) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  transfer.items.add(new File([bytes], "circle.png", { type: "image/png" }));
  return transfer;
}"""
# Notes every picture that a message of the model shows.
_WATCH = """() => {
  window.seen = new Set();
  const note = () => document.querySelectorAll("article.assistant img").forEach((image) => window.seen.add(image.src));
  new MutationObserver(note).observe(document.getElementById("log"), {
    subtree: true, childList: true, attributes: true, attributeFilter: ["src"],
  });
}"""


class Blind(FakeTokenizer):
    """Of a second model, which reads no pictures."""

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="blind", context=4096)]


class BlindDecode(FakeDecode):
    models = Blind.models


@dataclass
class Pictures:
    url: str
    tokenizer: FakeTokenizer
    painter: Diffusion


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pictures(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pictures]:
    folder = diffusion_checkpoints.stable_diffusion(
        tmp_path_factory.mktemp("sd") / "model", "euler"
    )
    port = free_port()
    async with NatsServer() as nats, service_process(nats, "motet_gateway", "--port", str(port)):
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        painter = Diffusion(config(folder), await nats.bus("diffusion"))
        decode = FakeDecode(None, await nats.bus("decode"))
        blind = (
            Blind(None, await nats.bus("tokenizer")),
            BlindDecode(None, await nats.bus("decode")),
        )
        async with (
            running(tokenizer),
            running(decode),
            running(blind[0]),
            running(blind[1]),
            running(painter),
        ):
            await asyncio.to_thread(
                until, lambda: _models(port) == 3, "the gateway knows all", START_SECONDS
            )
            yield Pictures(f"http://127.0.0.1:{port}", tokenizer, painter)


def _models(port: int) -> int:
    try:
        reply = fetch(f"http://127.0.0.1:{port}/v1/models")
    except httpx.HTTPError:
        return 0
    return len(reply.json()["data"])


@pytest_asyncio.fixture(loop_scope="module")
async def page(pictures: Pictures) -> AsyncIterator[Page]:
    pictures.tokenizer.requests.clear()
    pictures.tokenizer.reply = lambda request: words("A red circle.")
    async with browsing(pictures.url) as page:
        await page.locator("#model").select_option(MODEL)
        yield page


def png(width: int = 40, height: int = 30) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "png")
    return file.getvalue()


async def drop(page: Page, data: bytes) -> None:
    transfer = await page.evaluate_handle(_DROP, base64.b64encode(data).decode())
    await page.dispatch_event("body", "drop", {"dataTransfer": transfer})


async def draw(page: Page) -> None:
    await page.get_by_placeholder("Message").fill(PROMPT)
    await page.get_by_role("button", name="Draw", exact=True).click()


def asked(pictures: Pictures) -> Any:
    """The last chat that the model was asked for."""
    return pictures.tokenizer.requests[-1]


async def test_a_dropped_picture_goes_with_the_message_and_stays_in_the_conversation(
    pictures: Pictures, page: Page
) -> None:
    await drop(page, png())
    attached = page.get_by_role("group", name="Attachments")
    await expect(attached.get_by_role("img")).to_have_count(1)
    await send(page, "What is this?")
    await expect(page.locator("article.assistant > .text")).to_have_text("A red circle.")
    await expect(page.locator("article.user img")).to_have_count(1)
    await expect(attached).to_be_hidden()
    (image,) = asked(pictures).images
    assert image.file.nbytes == len(png())
    await send(page, "And its colour?")
    await expect(page.locator("article.assistant > .text")).to_have_text(["A red circle."] * 2)
    assert len(asked(pictures).images) == 1
    assert [message["role"] for message in asked(pictures).messages] == [
        "user",
        "assistant",
        "user",
    ]


async def test_large_pictures_are_sent_smaller_and_others_can_be_taken_away(
    pictures: Pictures, page: Page
) -> None:
    files = [
        {"name": name, "mimeType": "image/png", "buffer": data}
        for name, data in (("large.png", png(3000, 1500)), ("small.png", png()))
    ]
    await page.locator("#attachment-file").set_input_files(files)  # type: ignore[arg-type]
    thumbnails = page.get_by_role("button", name=", remove")
    await expect(thumbnails).to_have_count(2)
    await thumbnails.nth(1).click()
    await expect(thumbnails).to_have_count(1)
    assert await page.evaluate("document.querySelector('.thumbnail img').naturalWidth") == 1536
    await send(page, "What is this?")
    await expect(page.locator("article.assistant > .text")).to_have_text("A red circle.")
    assert len(asked(pictures).images) == 1


async def test_what_is_no_picture_is_refused(pictures: Pictures, page: Page) -> None:
    await drop(page, b"no picture")
    await expect(page.get_by_role("alert")).to_contain_text("circle.png is not a picture")
    await page.locator("#model").select_option("blind")
    await drop(page, png())
    await expect(page.get_by_role("alert")).to_contain_text("This model does not accept pictures")


async def test_a_picture_forms_and_is_asked_about(
    pictures: Pictures, page: Page, tmp_path: Path
) -> None:
    await page.evaluate(_WATCH)
    await draw(page)
    drawn = page.locator("article.assistant img")
    await expect(drawn).to_have_attribute("alt", PROMPT)
    assert (
        await eventually(page, "document.querySelector('article.assistant img').naturalWidth")
        == SIZE
    )
    assert await page.evaluate("seen.size") >= 3  # estimates, and the picture
    await expect(page.get_by_role("status", name="Speed")).to_contain_text("picture in")
    await page.get_by_role("button", name="Ask about it").click()
    await send(page, "What is this?")
    await expect(page.locator("article.assistant > .text")).to_have_text("A red circle.")
    assert len(asked(pictures).images) == 1
    assert (
        len(asked(pictures).messages) == 1
    )  # what was drawn is no part of the conversation until it is asked about
    await page.screenshot(path=tmp_path / "pictures.png")


async def test_a_seed_draws_the_same_picture_again(page: Page) -> None:
    drawn: list[str | None] = []
    for seed in (3, 3, 4):
        await set_seed(page, seed)
        await draw(page)
        last = page.locator("article.assistant img").nth(len(drawn))
        await expect(last).to_have_attribute("alt", PROMPT)
        drawn.append(await last.get_attribute("src"))
    assert drawn[0] == drawn[1] != drawn[2]


def draws_when_asked(request: Any) -> list[Text]:
    """A model that calls the tool, and then talks about the picture."""
    if (
        request.messages[-1]["role"] == "user"
        and request.messages[-1]["content"] == "Draw two red circles."
    ):
        return [*words("Gladly."), tool_call(json.dumps({"prompt": PROMPT}))]
    return words(" Two red circles.")


async def test_the_model_draws_in_the_conversation(
    pictures: Pictures, page: Page, tmp_path: Path
) -> None:
    pictures.tokenizer.reply = draws_when_asked
    await page.evaluate(_WATCH)
    await send(page, "Draw two red circles.")
    await expect(page.locator("article.assistant > .text")).to_have_text("Gladly. Two red circles.")
    drawn = page.locator("article.assistant img")
    await expect(drawn).to_have_attribute("alt", PROMPT)
    assert (
        await eventually(page, "document.querySelector('article.assistant img').naturalWidth")
        == SIZE
    )
    assert await page.evaluate("seen.size") >= 3  # estimates, and the picture
    await expect(page.get_by_role("status", name="Speed")).not_to_contain_text(
        "tokens/s"
    )  # it drew meanwhile
    assert len(asked(pictures).images) == 1, "the model looked at it"
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await page.screenshot(path=tmp_path / "imagined.png")
    await send(page, "Are they red?")
    await expect(page.locator("article.assistant > .text").nth(1)).not_to_be_empty()
    await expect(page.locator("article.assistant img")).to_have_count(1)
    later = asked(pictures)
    assert len(later.images) == 1, "the next question goes with it"
    roles = [message["role"] for message in later.messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "user"]


async def test_a_picture_of_the_model_that_is_stopped(pictures: Pictures, page: Page) -> None:
    pictures.tokenizer.reply = draws_when_asked
    await page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(post_data=_long(route.request.post_data)),
    )
    await send(page, "Draw two red circles.")
    await expect(page.get_by_role("status", name="Speed")).to_contain_text("of 2000")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await expect(page.locator("article.assistant > .text")).to_have_text("Gladly.")
    await expect(page.locator("article.assistant img")).to_have_count(0)
    await asyncio.to_thread(
        until, lambda: pictures.painter.stats()["running"] == 0, "nobody draws", 30
    )


async def test_a_picture_that_is_stopped_leaves_nothing(pictures: Pictures, page: Page) -> None:
    await page.route(
        "**/v1/images/generations",
        lambda route: route.continue_(post_data=_long(route.request.post_data)),
    )
    await draw(page)
    await expect(page.get_by_role("status", name="Speed")).to_contain_text("of 2000")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator("article")).to_have_count(0)
    await expect(page.get_by_placeholder("Message")).to_have_value(PROMPT)
    await asyncio.to_thread(
        until, lambda: pictures.painter.stats()["running"] == 0, "nobody draws", 30
    )


def _long(body: str | None) -> str:
    """The request with as many steps as there may be."""
    return (body or "").replace('"progress":true', '"progress":true,"steps":2000')


# Chromium reports no files of a form: what is given to `fetch` is kept, as numbers.
_RECORD_FORM = """() => {
  const send = window.fetch;
  const value = async (one) => (one instanceof Blob ? [...new Uint8Array(await one.arrayBuffer())] : one);
  window.fetch = async (url, options) => {
    if (options?.body instanceof FormData) {
      const fields = [...options.body].map(async ([name, one]) => [name, await value(one)]);
      window.sentForm = Object.fromEntries(await Promise.all(fields));
    }
    return send(url, options);
  };
}"""


async def test_the_part_of_a_picture_that_is_painted_over_is_edited(
    pictures: Pictures, page: Page
) -> None:
    await draw(page)
    drawn = page.locator("article.assistant img")
    await expect(drawn).to_have_attribute("alt", PROMPT)
    source = base64.b64decode((await drawn.get_attribute("src") or "").split(",")[1])
    await page.locator("article.assistant button.picture").click()
    box = page.get_by_role("dialog", name="Picture")
    await box.get_by_role("button", name="Edit").click()
    await box.get_by_label("Brush").fill("4")
    area = await box.locator("#lightbox-mask").bounding_box()
    assert area is not None
    await page.mouse.move(area["x"] + 1, area["y"] + area["height"] / 4)
    await page.mouse.down()
    await page.mouse.move(area["x"] + area["width"] - 1, area["y"] + area["height"] / 4)
    await page.mouse.up()
    await box.get_by_label("What it becomes").fill("a blue square")
    await page.evaluate(_RECORD_FORM)
    await box.get_by_role("button", name="Change").click()
    form = await eventually(page, "window.sentForm")
    parts = {
        name: bytes(value) if isinstance(value, list) else value for name, value in form.items()
    }
    assert parts["image"] == source
    assert parts["prompt"] == "a blue square"
    with Image.open(BytesIO(parts["mask"])) as mask:
        alpha = mask.getchannel("A")
    assert alpha.size == (SIZE, SIZE)
    assert alpha.getpixel((SIZE // 2, SIZE // 4)) == 0, "open to change"
    assert alpha.getpixel((SIZE // 2, SIZE - 1)) == 255, "kept"
    await expect(drawn).to_have_count(2)
    await expect(drawn.nth(1)).to_have_attribute("alt", "a blue square")
    await expect(page.locator("article.user img")).to_have_count(1)
    edited = base64.b64decode((await drawn.nth(1).get_attribute("src") or "").split(",")[1])
    with Image.open(BytesIO(source)) as before, Image.open(BytesIO(edited)) as after:
        assert before.size == after.size
        assert before.convert("RGB").tobytes() != after.convert("RGB").tobytes()
