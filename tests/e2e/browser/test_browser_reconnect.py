"""The page's socket breaks while it talks: Chromium, the gateway and vad as processes, and a cable that is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import expect

from e2e.browser.browser import browsing, eventually, microphone
from e2e.cable import Cable
from e2e.voice_stack import voice_stack
from support.media.spoken import say, silence
from support.services.fake_services import words

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]

HELLO = "Two red circles and a blue square."
ANSWER = "Here they are. Both of them are red, I think. I can draw you more, in any colour that you name."


async def test_a_conversation_goes_on_over_another_socket(tmp_path: Path) -> None:
    """Cut while the user speaks and while the model does: one turn is heard, and the reply is whole."""
    args = microphone(tmp_path, silence(1500) + say(HELLO) + silence(1000))
    async with voice_stack() as stack, Cable.to(stack.port) as cable:
        stack.asr.script, stack.tts.pace = ["two red circles"], 0.15
        stack.tokenizer.reply = lambda request: words(ANSWER)
        async with browsing(cable.url, args, cut=True) as page:
            await page.get_by_role("button", name="Talk", exact=True).click()
            await expect(page.get_by_role("region", name="Spoken conversation")).to_be_visible()
            await eventually(page, "window.sent.ms > 1800")
            cable.cut()
            reply = page.locator("article.assistant > .text")
            for heard in ("Here", "red"):
                await expect(reply).to_contain_text(heard)
                cable.cut()
            await expect(reply).to_have_text(ANSWER)
            await expect(page.locator(".ahead")).to_be_empty()
            await expect(page.locator("article.user > p")).to_have_text("two red circles")
            await page.get_by_role("button", name="End", exact=True).click()
            await expect(page.get_by_role("region", name="Spoken conversation")).to_be_hidden()
        assert cable.sockets == 4
        assert len(stack.asr.heard) == len(stack.tokenizer.requests) == 1
