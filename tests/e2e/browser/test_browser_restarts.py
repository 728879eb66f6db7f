"""The page while services die and come back: what was written stays, and the conversation goes on."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Route, expect

from e2e.browser.browser import browsing, eventually, send
from e2e.stack import ENDLESS, MotetStack

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]

SQUARE = "Here is a blue square."


async def test_a_conversation_goes_on_after_the_gateway_was_restarted(stack: MotetStack) -> None:
    """Killed in the middle of a reply: what had arrived stays, and the next message knows all of it."""
    async with browsing(stack.url, cut=True, refused=True) as page:
        await page.locator("#model").select_option("pocket-chat")
        await send(page, SQUARE)
        await expect(page.locator("article.assistant .actions")).to_be_visible()
        await page.locator("#model").select_option(ENDLESS)
        await send(page, "Go on.")
        answers = page.locator("article.assistant > .text")
        await expect(answers.nth(1)).to_have_text(re.compile(".{30}", re.DOTALL))
        wait = stack.kill("gateway")
        await expect(page.get_by_role("alert")).to_contain_text("broke")
        kept = await answers.all_inner_texts()
        assert len(kept[1]) >= 30
        await asyncio.to_thread(wait)
        await asyncio.to_thread(stack.wait_until_all_ready)
        await page.reload()
        await expect(answers).to_have_count(2)
        assert [text.strip() for text in await answers.all_inner_texts()] == [
            text.strip() for text in kept
        ]
        await page.locator("#model").select_option("pocket-chat")
        await page.locator("article.user").nth(1).get_by_role("button", name="Edit").click()
        await page.get_by_label("Edited message").fill("What colour is the square?")
        await page.keyboard.press("Enter")
        await expect(answers.nth(1)).to_contain_text("blue", ignore_case=True)


async def test_a_page_whose_scripts_fail_to_load_is_loaded_again(stack: MotetStack) -> None:
    async with browsing(stack.url, cut=True) as page:
        failed: list[str] = []

        async def fail_once(route: Route) -> None:
            if failed:
                await route.continue_()
            else:
                failed.append(route.request.url)
                await route.abort("connectionrefused")

        await page.route("**/chat/markdown.js", fail_once)
        await page.reload()
        await expect(page.locator("#model")).to_be_enabled()
        assert len(failed) == 1


async def test_a_reply_goes_on_after_the_tokenizer_was_killed(stack: MotetStack) -> None:
    """The reply waits for the tokenizer that replaces it, or says that it broke; nothing before it is lost."""
    async with browsing(stack.url, cut=True, refused=True) as page:
        await page.locator("#model").select_option("pocket-chat")
        await send(page, SQUARE)
        await expect(page.locator("article.assistant .actions")).to_be_visible()
        await page.locator("#model").select_option(ENDLESS)
        await send(page, "Go on.")
        answer = page.locator("article.assistant > .text").nth(1)
        await expect(answer).to_have_text(re.compile(".{30}", re.DOTALL))
        wait = stack.kill("tokenizer")
        seen = len(await answer.inner_text())
        await asyncio.to_thread(wait)
        await asyncio.to_thread(stack.wait_until_all_ready)
        await eventually(
            page,
            "document.querySelectorAll('article.assistant > .text')[1].innerText.length > SEEN"
            " || !document.getElementById('error').hidden".replace("SEEN", str(seen + 40)),
        )
        if await page.get_by_role("button", name="Stop").is_visible():
            await page.get_by_role("button", name="Stop").click()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.locator("#model").select_option("pocket-chat")
        await page.locator("article.user").nth(1).get_by_role("button", name="Edit").click()
        await page.get_by_label("Edited message").fill("What colour is the square?")
        await page.keyboard.press("Enter")
        await expect(answer).to_contain_text("blue", ignore_case=True)
