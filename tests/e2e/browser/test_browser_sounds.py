"""Test sounds on the page outside of spoken conversations: replies read aloud, and sound files attached to messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from e2e.browser.browser import browsing, eventually, send
from motet_media.audio import wav_header
from motet_shared.testing import NatsServer, running
from support.services.fake_services import FakeDecode, FakeTokenizer
from support.services.voice_services import ScriptedAsr, ScriptedTts, tone
from support.stages.served_gateway import KEY, served_gateway

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]

RATE = 24000
SOUND = wav_header(RATE, len(tone(800))) + tone(800)
PLAYS = ["--autoplay-policy=no-user-gesture-required"]


@dataclass
class Sounds:
    page: Page
    tokenizer: FakeTokenizer
    asr: ScriptedAsr
    tts: ScriptedTts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Sounds]:
    async with NatsServer() as nats, served_gateway(nats) as gateway:
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        decode = FakeDecode(None, await nats.bus("decode"))
        asr, tts = ScriptedAsr(await nats.bus("asr")), ScriptedTts(await nats.bus("tts"))
        url = f"http://127.0.0.1:{gateway.port}/"
        async with (
            running(tokenizer),
            running(decode),
            running(asr),
            running(tts),
            browsing(url, PLAYS, refused=True) as page,
        ):
            await page.get_by_label("API key").fill(KEY)
            await page.get_by_label("API key").press("Enter")
            await expect(page.locator("#model")).to_be_enabled()
            yield Sounds(page, tokenizer, asr, tts)


@pytest_asyncio.fixture(loop_scope="module")
async def sounds(served: Sounds) -> Sounds:
    """A new conversation."""
    served.asr.go_on.set()
    await served.page.get_by_role("button", name="New chat").click()
    await expect(served.page.locator("article")).to_have_count(0)
    return served


def _file(name: str = "note.wav") -> Any:
    return {"name": name, "mimeType": "audio/wav", "buffer": SOUND}


async def test_a_reply_is_read_aloud_and_silenced(sounds: Sounds) -> None:
    page, sounds.tts.pace = sounds.page, 0.05
    await send(page, "Say something long: " + "word " * 40)
    button = page.get_by_role("button", name="Read aloud")
    await button.click()
    await expect(button).to_have_attribute("aria-pressed", "true")
    await eventually(page, "loudness() > 0.1")
    await button.click()
    await expect(button).not_to_have_attribute("aria-pressed", "true")
    await eventually(page, "loudness() < 0.01")
    assert sounds.tts.requests[-1].text.startswith("You said: Say something long")
    for _ in range(100):
        if sounds.tts.cancelled:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the synthesis goes on without a listener")


async def test_what_has_been_read_aloud_ends_by_itself(sounds: Sounds) -> None:
    page, sounds.tts.pace = sounds.page, 0.0
    await send(page, "Yes.")
    button = page.get_by_role("button", name="Read aloud")
    await button.click()
    await eventually(page, "loudness() > 0.1")
    await expect(button).not_to_have_attribute("aria-pressed", "true")


async def test_a_sound_goes_with_the_message_as_its_transcript(sounds: Sounds) -> None:
    page, sounds.asr.script = sounds.page, ["two red circles"]
    await page.locator("#attachment-file").set_input_files([_file()])
    await expect(page.get_by_role("button", name="note.wav, remove")).to_be_visible()
    await send(page, "What did I say?")
    await expect(page.locator("article.assistant > .text")).to_contain_text("You said")
    content = sounds.tokenizer.requests[-1].messages[-1]["content"]
    assert content == "Transcript of note.wav: two red circles\n\nWhat did I say?"
    assert sounds.asr.heard[-1] == (RATE, SOUND[44:])
    heard = page.locator("article.user audio")
    await expect(heard).to_have_count(1)
    await eventually(page, "document.querySelector('article.user audio').duration > 0.7")
    await expect(page.locator("#conversation-list [aria-current]")).to_be_visible()
    await page.reload()
    await eventually(page, "document.querySelector('article.user audio')?.duration > 0.7")


async def test_a_message_waits_for_the_sound_that_belongs_to_it(sounds: Sounds) -> None:
    page, sounds.asr.script = sounds.page, ["a blue square"]
    sounds.asr.go_on.clear()
    await page.locator("#attachment-file").set_input_files([_file("slow.wav")])
    await expect(page.get_by_text("Reading slow.wav…")).to_be_visible()
    await send(page, "And now?")
    await expect(page.get_by_placeholder("Message")).to_have_value("And now?")
    sounds.asr.go_on.set()
    await expect(page.locator("article.assistant > .text")).to_contain_text("a blue square")
    await expect(page.get_by_placeholder("Message")).to_have_value("")
