"""A day's work on the page: ten conversations with files, voice, pictures and a phone, of which nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.async_api import Page, expect

from e2e.browser.browser import browsing, eventually, microphone, send
from e2e.stack import START_SECONDS, fetch, until
from e2e.voice_stack import VoiceStack, voice_stack
from motet_media.audio import wav_header
from motet_shared.messages import DenoisingProgress, Draw, Picture
from motet_shared.process.actor import operation
from motet_shared.testing import running
from motet_shared.wire.call import Call
from support.media.spoken import say, silence
from support.services.drawing_services import FakeDiffusion
from support.services.voice_services import tone

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]

CONVERSATIONS = 10
SPOKEN = "What is on the table?"
SOUND = wav_header(24000, len(tone(800))) + tone(800)
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
}
# All that the open conversation shows: texts, pictures, sounds, attached files.
_SHOWN = """() => [...document.querySelectorAll("#log article")].map((article) => ({
  role: article.className,
  text: article.querySelector(".text")?.innerText.trim() ?? "",
  pictures: [...article.querySelectorAll("img")].map((image) => image.src),
  sounds: article.querySelectorAll("audio").length,
  files: [...article.querySelectorAll("details.fold pre")].map((file) => file.textContent),
}))"""
_TYPESET = """() => [...document.querySelectorAll(".math")].every((one) => one.children.length)"""


async def shown(page: Page) -> list[dict[str, Any]]:
    """Return what the open conversation shows, once its formulas are typeset."""
    await eventually(page, _TYPESET)
    return await page.evaluate(_SHOWN)


def png(colour: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (48, 48), colour).save(file, "png")
    return file.getvalue()


class Painter(FakeDiffusion):
    """Draw a green square, whatever is asked for."""

    @operation(Draw)
    async def draw(self, call: Call, request: Draw) -> None:
        await call.send(DenoisingProgress(1, 1))
        blob = await self.store.put_async(png("green"), readers=(call.caller,))
        await call.send(Picture(blob, 48, 48, 1))
        call.finish("stop")


@asynccontextmanager
async def all_services() -> AsyncIterator[VoiceStack]:
    """Speech, chat and pictures."""
    async with voice_stack() as stack, running(Painter(await stack.nats.bus("diffusion"))):
        models = f"http://127.0.0.1:{stack.port}/v1/models"
        await asyncio.to_thread(
            until, lambda: "image" in fetch(models).text, "the gateway draws", START_SECONDS
        )
        yield stack


class Day:
    """What is done on the page, and what each conversation showed when it was left."""

    def __init__(self, stack: VoiceStack, page: Page) -> None:
        self.stack, self.page = stack, page
        self.shown: list[list[dict[str, Any]]] = []

    async def attach(self, name: str, kind: str, content: bytes) -> None:
        file: Any = {"name": name, "mimeType": kind, "buffer": content}
        await self.page.locator("#attachment-file").set_input_files(file)
        await expect(self.page.locator("#attachments > button")).to_have_count(1)

    async def ask(self, text: str) -> None:
        replies = await self.page.locator("article.assistant").count()
        await send(self.page, text)
        await self.answered(replies + 1)

    async def answered(self, replies: int) -> None:
        """Wait for this many replies that have ended."""
        actions = self.page.locator("article.assistant:last-of-type .actions")
        await expect(self.page.locator("article.assistant")).to_have_count(replies)
        await expect(actions).to_have_count(1)

    async def draw(self, text: str) -> None:
        await self.page.get_by_placeholder("Message").fill(text)
        await self.page.get_by_role("button", name="Draw", exact=True).click()
        await expect(self.page.locator("article.assistant img")).to_have_count(1)
        await self.answered(1)

    async def talk(self) -> None:
        self.stack.asr.script = [SPOKEN]
        await self.page.get_by_role("button", name="Talk", exact=True).click()
        said = self.page.locator("article.assistant .text")
        await expect(said).to_contain_text(SPOKEN)
        await expect(self.page.locator(".ahead")).to_be_empty()  # all of it was heard
        await expect(self.page.get_by_role("status", name="Conversation")).to_contain_text(
            "Listening"
        )
        await self.page.get_by_role("button", name="End", exact=True).click()

    async def edit(self, text: str) -> None:
        await self.page.locator("article.user").last.get_by_role("button", name="Edit").click()
        await self.page.get_by_label("Edited message").fill(text)
        await self.page.get_by_role("button", name="Send again").click()
        await expect(self.page.locator("article.assistant .text")).to_contain_text(text)
        await self.answered(1)

    async def leave(self) -> None:
        """Begin a new conversation, once the browser has stored this one."""
        await expect(self.page.locator("#conversation-list [aria-current]")).to_have_count(1)
        self.shown.append(await shown(self.page))
        await self.page.get_by_role("button", name="New chat").click()
        await expect(self.page.locator("article")).to_have_count(0)


async def work(day: Day) -> None:
    """Hold ten conversations."""
    await day.ask("One.")
    await day.ask("One more.")
    await day.leave()
    await day.attach("notes.txt", "text/plain", b"buy bread")
    await day.ask("What do I need?")
    await day.leave()
    await day.attach("red.png", "image/png", png("red"))
    await day.ask("What is this?")
    await day.leave()
    day.stack.asr.script = ["a note to myself"]
    await day.attach("note.wav", "audio/wav", SOUND)
    await day.ask("What did I say?")
    await day.leave()
    await day.draw("a green square")
    await day.leave()
    await day.talk()
    await day.ask("And what was that?")
    await day.leave()
    await day.page.reload()  # in the middle of the day
    await expect(day.page.locator("#model")).to_be_enabled()
    await day.page.get_by_role("button", name="New chat").click()
    await day.ask("Two.")
    await day.edit("Three.")
    await day.leave()
    await day.ask("Four.")
    await day.page.get_by_role("button", name="Regenerate").last.click()
    await expect(day.page.get_by_label("Version 2 of 2")).to_be_visible()
    await day.answered(1)
    await day.leave()
    await day.ask("A **bold** word, `code` and $x^2$.")
    await day.leave()
    await day.ask("Last of all.")
    await day.leave()


async def opened(page: Page) -> list[list[dict[str, Any]]]:
    """Open every stored conversation, the oldest first, and return what each shows."""
    entries = page.locator("#conversation-list li")
    await expect(entries).to_have_count(CONVERSATIONS)
    found = []
    for number in reversed(range(CONVERSATIONS)):
        if await page.locator("#conversations").is_hidden():
            await page.get_by_role("button", name="Conversations").click()
        await entries.nth(number).get_by_role("button").first.click()
        await expect(entries.nth(number).locator("[aria-current]")).to_have_count(1)
        found.append(await shown(page))
    return found


async def test_a_days_work_loses_nothing(tmp_path: Path) -> None:
    spoken = microphone(tmp_path, silence(1500) + say(SPOKEN) + silence(1000))
    async with all_services() as stack:
        url = f"http://127.0.0.1:{stack.port}/"
        async with browsing(url, spoken) as page:
            await expect(page.locator("#model")).to_be_enabled()
            day = Day(stack, page)
            await work(day)
            await page.reload()
            await expect(page.locator("#model")).to_be_enabled()
            assert await opened(page) == day.shown
            async with page.expect_download() as waiting:
                await page.get_by_role("button", name="Export all").click()
            await (await waiting.value).save_as(tmp_path / "all.json")
        async with browsing(url, **PHONE) as page:
            await expect(page.locator("#model")).to_be_enabled()
            await page.get_by_role("button", name="Conversations").click()
            await page.locator("#import-file").set_input_files(tmp_path / "all.json")
            assert await opened(page) == day.shown
    assert sum(len(message["pictures"]) for one in day.shown for message in one) == 2
    assert sum(message["sounds"] for one in day.shown for message in one) == 1
    assert [len(one) for one in day.shown] == [4, 2, 2, 2, 2, 4, 2, 2, 2, 2]
