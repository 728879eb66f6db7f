"""The page at `/`, in a headless browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from e2e.stack import ENDLESS, WAIT_SECONDS, MotetStack

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def page(stack: MotetStack) -> Iterator[Page]:
    """A page that had no error by the end of the test."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
        page.set_default_timeout(WAIT_SECONDS * 1000)
        expect.set_options(timeout=WAIT_SECONDS * 1000)
        page.goto(stack.url)
        yield page
        browser.close()
        assert not problems


def ask(page: Page, model: str, text: str) -> None:
    page.locator("#model").select_option(model)
    page.get_by_placeholder("Message").fill(text)
    page.get_by_placeholder("Message").press("Enter")


def test_a_question_is_answered_and_the_next_one_knows_it(page: Page) -> None:
    ask(page, "pocket-chat", "Here is a blue square.")
    answers = page.locator("article.assistant")
    expect(answers).to_have_count(1)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "pocket-chat", "What colour is the square?")
    expect(answers.nth(1)).to_contain_text("blue", ignore_case=True)
    expect(page.get_by_role("status", name="Speed")).to_contain_text("tokens")
    assert page.locator("article.user").all_text_contents() == [
        "Here is a blue square.",
        "What colour is the square?",
    ]


def test_an_answer_streams_until_it_is_stopped(page: Page) -> None:
    ask(page, ENDLESS, "Hello!")
    stop = page.get_by_role("button", name="Stop")
    answer = page.locator("article.assistant").first
    expect(answer).to_have_text(re.compile(".{50}", re.DOTALL))
    seen = len(answer.inner_text())
    expect(answer).to_have_text(re.compile(f".{{{seen + 1}}}", re.DOTALL))
    stop.click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(stop).to_be_hidden()
    expect(page.get_by_role("status", name="Speed")).to_contain_text("stopped")
    final = answer.inner_text()
    ask(page, "pocket-chat", "Hello!")
    expect(page.locator("article.assistant").nth(1)).not_to_be_empty()
    assert answer.inner_text() == final


def test_a_new_chat_forgets(page: Page) -> None:
    ask(page, "pocket-chat", "Hello!")
    expect(page.locator("article.assistant").first).not_to_be_empty()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
