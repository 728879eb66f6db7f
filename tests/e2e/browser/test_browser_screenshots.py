"""Compare what the page looks like, with fixed replies and one font, to stored screenshots.

`MOTET_SCREENSHOTS=write pytest tests/e2e/browser/test_browser_screenshots.py` stores them anew: look at
them before they are committed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image
from playwright.async_api import Page, ViewportSize, expect

from e2e.browser.accessible import violations
from e2e.browser.browser import browsing, send
from e2e.browser.canned import answer_canned, set_font
from motet_shared.testing import NatsServer
from support.running.pictures_compared import TOLERANCE, difference, store
from support.stages.served_gateway import served_gateway

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]

STORED = Path(__file__).with_name("screenshots")
WRITES = os.environ.get("MOTET_SCREENSHOTS") == "write"
WIDTHS = {1440: 900, 768: 1024, 390: 844}  # heights by width
ROOM = {
    1440: 2000,
    768: 2500,
    390: 3300,
}  # heights in which the view of the stack has no scroll bar


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[Page]:
    async with NatsServer() as nats, served_gateway(nats) as gateway:
        url = f"http://127.0.0.1:{gateway.port}/"
        async with browsing(url, refused=True, timezone_id="UTC", locale="en-GB") as page:
            await answer_canned(page)
            await set_font(page)
            await page.goto(url)
            await page.evaluate("document.fonts.ready")
            yield page


async def look(page: Page, width: int, height: int, scheme: str) -> None:
    await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    await page.set_viewport_size(ViewportSize(width=width, height=height))


async def compare(page: Page, name: str, folder: Path) -> None:
    """Compare the page with the stored screenshot, or store it."""
    taken = await page.screenshot(animations="disabled", mask=[page.locator("#stats")])
    shown = Image.open(BytesIO(taken))
    path = STORED / f"{name}.png"
    if WRITES:
        store(shown, path)
    with Image.open(path) as stored:
        found = difference(shown, stored)
    if found > TOLERANCE:
        shown.save(folder / f"{name}.png")
        pytest.fail(f"{name}: {found:.1%} of it differs; it looks now like {folder}/{name}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_the_first_view(page: Page, tmp_path: Path, width: int, scheme: str) -> None:
    await look(page, width, WIDTHS[width], scheme)
    await page.get_by_role("button", name="New chat").click()
    await page.mouse.move(0, 0)
    await expect(page.get_by_role("list", name="Models here")).to_be_visible()
    loading = page.get_by_role("listitem").filter(has_text="larger-chat")
    await expect(loading).to_contain_text("loading 40 %, about 12 s")
    await expect(loading.get_by_role("progressbar")).to_have_attribute("value", "0.4")
    await compare(page, f"first-{width}-{scheme}", tmp_path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_a_conversation(page: Page, tmp_path: Path, width: int, scheme: str) -> None:
    await look(page, width, WIDTHS[width], scheme)
    await page.get_by_role("button", name="New chat").click()
    await send(page, "How many circles are there?")
    await expect(page.locator("article.assistant .actions")).to_be_visible()
    await expect(page.locator(".hljs-keyword").first).to_be_visible()
    await page.mouse.move(0, 0)
    await compare(page, f"chat-{width}-{scheme}", tmp_path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_the_stack(page: Page, tmp_path: Path, width: int, scheme: str) -> None:
    url = await page.evaluate("location.origin")
    await look(page, width, ROOM[width], scheme)
    await page.goto("about:blank")  # else the history of states grows, and its curves
    await page.goto(f"{url}#stack")
    await expect(page.locator(".flow")).to_contain_text("tokens/s")
    await page.get_by_role("button", name="Pause").click()
    await page.get_by_role("button", name="Open the slowest").click()
    await expect(page.get_by_role("table")).to_be_visible()
    if width == min(WIDTHS):
        assert await violations(page) == []
    await page.evaluate("document.getElementById('stack').scrollTop = 0")
    await compare(page, f"stack-{width}-{scheme}", tmp_path)
    await page.goto("about:blank")
    await page.goto(url)
