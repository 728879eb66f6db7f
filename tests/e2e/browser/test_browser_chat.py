"""Test the page's chat in one browser: stored conversations, Markdown, files, versions, accessibility."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from e2e.browser.accessible import violations
from e2e.browser.browser import browsing, send
from motet_gateway.ollama import pull
from motet_shared.messages import Text
from motet_shared.testing import NatsServer, running
from support.services.fake_services import FakeDecode, FakeTokenizer, tool_call, words
from support.stages.served_gateway import KEY, served_gateway

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

MARKDOWN = """# Shapes

A **red** circle, <img src=x onerror="window.broken = 1"> and [a link](https://shapes.example/) or
[none](javascript:alert(1)).

| shape | count |
|---|---|
| circle | 2 |

```python
def area(r): return 3 * r ** 2
```

The area is $\\pi r^2$, for $5 or $6.

$$\\frac{a}{b}$$
"""


@dataclass
class Chat:
    url: str
    tokenizer: FakeTokenizer
    page: Page

    @property
    def replies(self) -> Locator:
        return self.page.locator("article.assistant > .text")

    async def ask(self, text: str) -> None:
        """Send a message and wait for the end of its reply."""
        await send(self.page, text)
        await expect(self.page.locator("article.user").last).to_contain_text(text)
        await expect(self.page.get_by_role("button", name="Stop", exact=True)).to_be_hidden()

    async def stored(self) -> None:
        """Wait until the conversation is in the list of stored ones."""
        await expect(self.page.locator("#conversation-list [aria-current]")).to_be_visible()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Chat]:
    """One gateway, one browser, for all tests of the module."""
    async with NatsServer() as nats, served_gateway(nats) as gateway:
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        decode = FakeDecode(None, await nats.bus("decode"))
        url = f"http://127.0.0.1:{gateway.port}/"
        options: dict[str, Any] = {"viewport": {"width": 1200, "height": 800}}
        async with (
            running(tokenizer),
            running(decode),
            browsing(url, refused=True, **options) as page,
        ):
            await page.get_by_label("API key").fill(KEY)
            await page.get_by_label("API key").press("Enter")
            await expect(page.locator("#model")).to_be_enabled()
            yield Chat(url, tokenizer, page)


@pytest_asyncio.fixture(loop_scope="module")
async def chat(served: Chat) -> Chat:
    """A new conversation."""
    served.tokenizer.reply, served.tokenizer.pace = _echo, 0.0
    served.tokenizer.requests.clear()
    await served.page.get_by_role("button", name="New chat").click()
    await expect(served.page.locator("article")).to_have_count(0)
    return served


def _echo(request: Any) -> list[Text]:
    content = request.messages[-1]["content"]
    return words(f"You said: {content}")


async def test_a_conversation_survives_a_reload_with_its_settings(chat: Chat) -> None:
    page = chat.page
    await page.get_by_text("Settings", exact=True).click()
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_label("Temperature").fill("0.7")
    await page.keyboard.press("Escape")
    await chat.ask("A red circle.")
    await chat.stored()
    await page.get_by_placeholder("Message").fill("half a sentence")
    await page.reload()
    await expect(chat.replies).to_have_text(["You said: A red circle."])
    await expect(page.get_by_placeholder("Message")).to_have_value("half a sentence")
    await expect(page.locator("#model")).to_be_enabled()
    await chat.ask("And now?")
    request = chat.tokenizer.requests[-1]
    assert [message["content"] for message in request.messages] == [
        "Be brief.", "A red circle.", "You said: A red circle.", "And now?",
    ]  # fmt: skip
    assert request.sampling.temperature == pytest.approx(0.7)


async def test_a_reload_during_a_reply_keeps_what_had_arrived(chat: Chat) -> None:
    chat.tokenizer.reply = lambda request: words("word " * 500)
    chat.tokenizer.pace = 0.02
    await send(chat.page, "Count.")
    await expect(chat.replies).to_contain_text("word word word")
    await chat.stored()
    await expect(chat.page.locator("#conversation-list .title").first).to_have_text("Count.")
    await chat.page.wait_for_timeout(700)  # longer than the delay of a save
    await chat.page.reload()
    await expect(chat.replies).to_contain_text("word word word")


async def test_conversations_are_searched_renamed_exported_and_deleted(
    chat: Chat, tmp_path: Path
) -> None:
    page, titles = chat.page, chat.page.locator("#conversation-list .title")
    await chat.ask("Of zebras.")
    await page.get_by_role("button", name="New chat").click()
    await chat.ask("Of giraffes.")
    await expect(titles.first).to_have_text("Of giraffes.")
    search = page.get_by_role("searchbox", name="Search conversations")
    await search.fill("you ZEBRAS")
    await expect(titles).to_have_text(["Of zebras."])
    await titles.first.click()
    await expect(chat.replies).to_have_text(["You said: Of zebras."])
    await search.fill("")
    options = page.get_by_label("Options of Of zebras.")
    await options.click()
    await page.get_by_role("button", name="Rename").click()
    await page.get_by_label("Name", exact=True).fill("Stripes")
    await page.keyboard.press("Enter")
    await expect(titles.filter(has_text="Stripes")).to_have_count(1)
    await page.get_by_label("Options of Stripes").click()
    async with page.expect_download() as waiting:
        await page.get_by_role("button", name="Export as JSON").click()
    file = tmp_path / "stripes.json"
    await (await waiting.value).save_as(file)
    (exported,) = json.loads(file.read_text())["conversations"]
    assert [node["content"] for node in exported["nodes"]] == ["Of zebras.", "You said: Of zebras."]
    await page.get_by_label("Options of Stripes").click()
    await page.get_by_role("button", name="Delete").click()
    await expect(titles.filter(has_text="Stripes")).to_have_count(0)
    await expect(page.locator("article")).to_have_count(0)
    await page.get_by_role("button", name="Undo").click()
    await expect(titles.filter(has_text="Stripes")).to_have_count(1)
    await page.locator("#import-file").set_input_files(file)
    await expect(titles.filter(has_text="Stripes")).to_have_count(2)


async def test_markdown_is_rendered_and_nothing_of_it_runs(chat: Chat) -> None:
    page = chat.page
    chat.tokenizer.reply = lambda request: words(MARKDOWN)
    await chat.ask("Markdown, please.")
    text = chat.replies
    await expect(text.locator("h2")).to_have_text("Shapes")
    await expect(text.locator("strong")).to_have_text("red")
    await expect(text.locator("td")).to_have_text(["circle", "2"])
    await expect(text.locator("math")).to_have_count(2)
    await expect(text.locator("math mfrac")).to_have_count(1)
    await expect(text.locator("pre .hljs-keyword").first).to_have_text("def")
    await expect(text.locator("img")).to_have_count(0)
    assert await text.locator("a").evaluate_all("links => links.map((a) => [a.href, a.rel])") == [
        ["https://shapes.example/", "noopener noreferrer"]
    ]
    assert await page.evaluate("window.broken") is None
    await expect(text).to_contain_text("for $5 or $6.")
    await page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    await text.get_by_role("button", name="Copy code").click()
    assert await page.evaluate("window.copied") == "def area(r): return 3 * r ** 2\n"
    await page.locator("article.assistant").get_by_role("button", name="Copy", exact=True).click()
    assert await page.evaluate("window.copied") == MARKDOWN
    assert await violations(page) == []


async def test_reasoning_and_tool_calls_are_folded(chat: Chat) -> None:
    def reply(request: Any) -> list[Text]:
        return [
            Text("", [1], reasoning="Circles first."),
            *words("Two."),
            tool_call('{"n": 2}', "count"),
        ]

    chat.tokenizer.reply = reply
    await chat.ask("Think.")
    folds = chat.page.locator("article.assistant details")
    await expect(folds.locator("summary")).to_have_text(["Reasoning", "Calls count"])
    await expect(folds.first.locator("pre")).to_be_hidden()
    await folds.first.locator("summary").click()
    await expect(folds.first.locator("pre")).to_have_text("Circles first.")


async def test_a_message_is_edited_regenerated_and_branched(chat: Chat) -> None:
    page = chat.page
    await chat.ask("One.")
    chat.tokenizer.reply = lambda request: words("Another.")
    await page.get_by_role("button", name="Regenerate").click()
    await expect(chat.replies).to_have_text(["Another."])
    await page.get_by_role("button", name="Previous version").click()
    await expect(chat.replies).to_have_text(["You said: One."])
    chat.tokenizer.reply = _echo
    await page.get_by_role("button", name="Edit", exact=True).click()
    await page.get_by_label("Edited message").fill("Two.")
    await page.keyboard.press("Enter")
    await expect(chat.replies).to_have_text(["You said: Two."])
    await expect(page.locator("article.user > p")).to_have_text(["Two."])
    await page.locator("article.user").get_by_role("button", name="Previous version").click()
    await expect(page.locator("article.user > p")).to_have_text(["One."])
    await expect(chat.replies).to_have_text(["Another."])
    await page.locator("article.assistant").get_by_role("button", name="Branch").click()
    await expect(page.locator("#conversation-list [aria-current]")).to_have_text("One. (branch)")
    await chat.ask("Three.")
    await expect(chat.replies).to_have_text(["Another.", "You said: Three."])


async def test_a_click_leads_from_a_reply_to_its_trace(chat: Chat) -> None:
    page = chat.page
    await chat.ask("How long?")
    await page.get_by_role("button", name="Trace").click()
    await expect(page.get_by_role("table")).to_be_visible()
    await expect(page.locator(".reply[aria-expanded=true]")).to_have_count(1)
    await expect(page.locator(".reply[aria-expanded=true]")).to_be_focused()
    assert await violations(page) == []
    await page.get_by_role("link", name="Chat").click()
    await page.evaluate("location.hash = 'stack/of-another-server'")
    await expect(page.get_by_text("keeps no trace of that reply")).to_be_visible()
    await page.get_by_role("link", name="Chat").click()
    await expect(chat.replies).to_have_text(["You said: How long?"])


async def test_a_stream_tells_how_far_its_model_is_loaded(chat: Chat) -> None:
    state = {"stage": "loading", "share": 0.4, "seconds": 3.2}
    chunk = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    body = f": loading {json.dumps(state)}\n\ndata: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    headers = {"content-type": "text/event-stream", "x-request-id": "one"}
    path = "**/v1/chat/completions"
    await chat.page.route(path, lambda route: route.fulfill(headers=headers, body=body))
    try:
        told = await chat.page.evaluate("""async () => {
            const { streamChat } = await import("/common/api.js");
            const { loadingText } = await import("/models/loading.js");
            const told = [];
            const follow = { begun: (id) => told.push(id), loading: (state) => told.push(loadingText(state)) };
            for await (const chunk of streamChat({}, "", undefined, follow)) told.push(chunk.choices[0].delta.content);
            return told;
        }""")
    finally:
        await chat.page.unroute(path)
    assert told == ["one", "loading 40 %, about 3 s", "Hi"]


@pytest.mark.long
async def test_edges_of_the_stack_move_while_a_reply_streams(chat: Chat) -> None:
    page, live = chat.page, chat.page.locator(".flow .edge.live")
    chat.tokenizer.reply = lambda request: words("word " * 2000)
    chat.tokenizer.pace = 0.02
    await send(page, "Go on.")
    await expect(chat.replies).to_contain_text("word word")
    await page.get_by_role("link", name="Stack").click()
    await expect(live).to_have_count(2)
    flow = page.get_by_role("list", name="Flow of requests").get_by_role("listitem")
    await expect(flow.filter(has_text="tokenizer")).to_contain_text("1 request")
    await page.get_by_role("link", name="Chat").click()
    await page.get_by_role("button", name="Stop", exact=True).click()
    await page.get_by_role("link", name="Stack").click()
    await expect(live).to_have_count(0)
    await page.get_by_role("link", name="Chat").click()


async def test_a_text_file_goes_with_the_message(chat: Chat) -> None:
    page = chat.page
    file = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"```\nshapes\n```"}
    await page.locator("#attachment-file").set_input_files([file])  # type: ignore[arg-type]
    await expect(page.get_by_role("button", name="notes.txt, remove")).to_be_visible()
    await chat.ask("Summarize.")
    content = chat.tokenizer.requests[-1].messages[-1]["content"]
    assert content == "File notes.txt:\n````\n```\nshapes\n```\n````\n\nSummarize."
    await expect(page.locator("article.user > p")).to_have_text("Summarize.")
    broken = {"name": "noise.bin", "mimeType": "", "buffer": b"\xff\x00\xfe"}
    await page.locator("#attachment-file").set_input_files([broken])  # type: ignore[arg-type]
    await expect(page.get_by_role("alert")).to_contain_text("noise.bin")


async def test_files_of_an_unsent_message_survive_a_reload(chat: Chat) -> None:
    page = chat.page
    file = {"name": "kept.txt", "mimeType": "text/plain", "buffer": b"two circles"}
    attached = page.get_by_role("button", name="kept.txt, remove")
    await page.locator("#attachment-file").set_input_files([file])  # type: ignore[arg-type]
    await expect(attached).to_be_visible()
    await expect(page.locator("#attachments")).to_have_attribute("aria-busy", "false")
    await page.reload()
    await expect(attached).to_be_visible()
    await expect(page.locator("#model")).to_be_enabled()
    await chat.ask("Summarize.")
    content = chat.tokenizer.requests[-1].messages[-1]["content"]
    assert content == "File kept.txt:\n```\ntwo circles\n```\n\nSummarize."
    await chat.stored()
    await page.reload()
    await expect(chat.replies).to_have_count(1)
    await expect(attached).to_have_count(0)


@pytest.mark.long
async def test_an_edit_is_sent_or_left_with_buttons(chat: Chat) -> None:
    page = chat.page
    await chat.ask("One.")
    edit = page.get_by_role("button", name="Edit", exact=True)
    await edit.click()
    await page.get_by_label("Edited message").fill("Two.")
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator("article.user > p")).to_have_text(["One."])
    await edit.click()
    await page.get_by_label("Edited message").fill("Three.")
    assert await violations(page) == []
    await page.get_by_role("button", name="Send again").click()
    await expect(chat.replies).to_have_text(["You said: Three."])


@pytest.mark.long
async def test_enter_starts_a_new_line_on_a_touch_screen(chat: Chat) -> None:
    page = chat.page
    session = await page.context.new_cdp_session(page)
    await session.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        field = page.get_by_placeholder("Message")
        await field.fill("One.")
        await field.press("Enter")
        await field.press_sequentially("Two.")
        await expect(field).to_have_value("One.\nTwo.")
        await page.get_by_role("button", name="Send", exact=True).click()
        await expect(chat.replies).to_have_text(["You said: One.\nTwo."], use_inner_text=True)
    finally:
        await session.send("Emulation.setTouchEmulationEnabled", {"enabled": False})


async def test_the_first_view_shows_what_each_model_can_do(chat: Chat) -> None:
    page = chat.page
    card = page.get_by_role("list", name="Models here").get_by_role("listitem")
    await expect(card.locator(".tag")).to_have_text(
        ["chats", "sees", "calls tools", re.compile("4k")]
    )
    await page.get_by_role("button", name="See What is in this picture?").click()
    await expect(page.locator("article.user img")).to_have_count(1)
    await expect(chat.replies).to_contain_text("You said")
    assert len(chat.tokenizer.requests[-1].images) == 1
    await page.locator("article.user button.picture").click()
    lightbox = page.get_by_role("dialog", name="Picture")
    await expect(lightbox).to_be_visible()
    async with page.expect_download() as waiting:
        await lightbox.get_by_role("button", name="Download").click()
    assert (await waiting.value).suggested_filename == "picture.png"
    assert await violations(page) == []
    await page.keyboard.press("Escape")
    await expect(lightbox).to_be_hidden()


DOWNLOAD = """
import json, os, sys, time
def tell(**fields): print(json.dumps(fields), flush=True)
tell(status="pulling manifest")
tell(status="pulling", completed=400_000, total=1_000_000)
while not os.path.exists(PATH): time.sleep(0.02)
tell(**({"status": "success"} if sys.argv[-1] == "org/name" else {"error": "no such repository"}))
"""


async def test_a_model_is_downloaded_with_its_progress(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, go_on = chat.page, tmp_path / "go on"
    program = DOWNLOAD.replace("PATH", repr(str(go_on)))
    monkeypatch.setattr(pull, "COMMAND", (sys.executable, "-S", "-c", program))
    await page.get_by_text("Add a model").click()
    for name in ("org/name", "org/none"):
        await page.get_by_label("Name on the hub").fill(name)
        await page.get_by_role("button", name="Download", exact=True).click()
    none, named = (
        page.get_by_role("list", name="Downloads").get_by_role("listitem").nth(n) for n in (0, 1)
    )
    await expect(named).to_contain_text("40 % of 1.00 MB")
    await expect(named.get_by_role("progressbar")).to_have_attribute("value", "400000")
    await expect(none).to_contain_text("40 %")
    assert await violations(page) == []
    go_on.touch()
    await expect(named).to_contain_text("motet up org/name")
    await expect(none).to_contain_text("no such repository")
    go_on.unlink()
    await page.get_by_label("Name on the hub").fill("org/name")
    await page.get_by_role("button", name="Download", exact=True).click()
    await page.get_by_role("button", name="Cancel the download of org/name").click()
    await expect(page.get_by_role("list", name="Downloads")).to_contain_text("cancelled")


@pytest.mark.long(after=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_phone_shows_all_of_it(chat: Chat, scheme: Any) -> None:
    page, size = chat.page, chat.page.viewport_size
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size({"width": 360, "height": 740})
    try:
        assert await violations(page) == []
        box = await page.get_by_placeholder("Message").bounding_box()
        assert box is not None
        assert box["width"] >= 320
        chat.tokenizer.reply = lambda request: words(MARKDOWN)
        await chat.ask("Markdown, please.")
        assert await violations(page) == []
        await page.get_by_role("button", name="Conversations").click()
        await expect(page.get_by_role("searchbox")).to_be_focused()
        assert await violations(page) == []
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("searchbox")).to_be_hidden()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
    finally:
        assert size is not None
        await page.set_viewport_size(size)
