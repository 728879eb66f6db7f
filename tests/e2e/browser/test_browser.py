"""The page at `/`, in a headless browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, expect

from e2e.browser.browser import browsing, send
from e2e.stack import ENDLESS, MotetStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]


@pytest.fixture
async def page(stack: MotetStack) -> AsyncIterator[Page]:
    async with browsing(stack.url) as page:
        yield page


async def ask(page: Page, model: str, text: str) -> None:
    await page.locator("#model").select_option(model)
    await send(page, text)


async def test_a_question_is_answered_and_the_next_one_knows_it(page: Page) -> None:
    await ask(page, "pocket-chat", "Here is a blue square.")
    answers = page.locator("article.assistant")
    await expect(answers).to_have_count(1)
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await ask(page, "pocket-chat", "What colour is the square?")
    await expect(answers.nth(1)).to_contain_text("blue", ignore_case=True)
    await expect(page.get_by_role("status", name="Speed")).to_contain_text("tokens")
    assert await page.locator("article.user").all_text_contents() == [
        "Here is a blue square.",
        "What colour is the square?",
    ]


async def test_an_answer_streams_until_it_is_stopped(page: Page) -> None:
    await ask(page, ENDLESS, "Hello!")
    stop = page.get_by_role("button", name="Stop")
    answer = page.locator("article.assistant").first
    await expect(answer).to_have_text(re.compile(".{50}", re.DOTALL))
    seen = len(await answer.inner_text())
    await expect(answer).to_have_text(re.compile(f".{{{seen + 1}}}", re.DOTALL))
    await stop.click()
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    await expect(stop).to_be_hidden()
    await expect(page.get_by_role("status", name="Speed")).to_contain_text("stopped")
    final = await answer.inner_text()
    await ask(page, ENDLESS, "Hello!")
    await expect(page.locator("article.assistant").nth(1)).not_to_be_empty()
    await stop.click()
    assert await answer.inner_text() == final


async def test_a_new_chat_forgets(page: Page) -> None:
    await ask(page, "pocket-chat", "Hello!")
    await expect(page.locator("article.assistant").first).not_to_be_empty()
    await page.get_by_role("button", name="New chat").click()
    await expect(page.locator("article")).to_have_count(0)


async def test_without_speech_services_the_button_says_why_it_is_off(page: Page) -> None:
    button = page.get_by_role("button", name="Talk", exact=True)
    await expect(button).to_have_attribute("aria-disabled", "true")
    await expect(button).to_have_accessible_description(re.compile("speech recognition"))
    await button.click(force=True)
    await expect(page.get_by_role("alert")).to_contain_text(
        "this server runs no speech recognition (--asr)"
    )
    assert not await page.evaluate("sent.types")
