"""The page's view of the stack, and the page as a whole for those who use the keyboard, a phone or a screen reader."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, expect

from e2e.browser.accessible import faults
from e2e.browser.browser import browsing
from e2e.browser.test_browser import ask
from e2e.stack import MotetStack
from motet_shared.testing import NatsServer, running
from motet_shared.wire.bus import Bus
from support.services.fake_services import FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, served_gateway

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]

PHONE = {"width": 360, "height": 740}


@asynccontextmanager
async def at_the_stack(stack: MotetStack, **options: Any) -> AsyncIterator[Page]:
    """The page after one reply, showing the stack."""
    async with browsing(stack.url, **options) as page:
        await ask(page, "pocket-chat", "Here is a blue square.")
        await expect(page.locator("article.assistant .text")).not_to_be_empty()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.keyboard.press("Alt+s")
        await expect(page.get_by_role("button", name="pocket-chat").first).to_be_visible()
        yield page


async def test_every_instance_is_shown_with_what_it_does(stack: MotetStack) -> None:
    async with at_the_stack(stack) as page:
        for role, count in (("gateway", 1), ("tokenizer", 1), ("decode", 2)):
            service = page.get_by_role("region", name=role, exact=True)
            await expect(service.locator(".card")).to_have_count(count)
            await expect(service.locator(".state").first).to_have_text("ready")
        await expect(page.get_by_role("status", name="State of the stack")).to_contain_text(
            "all ready"
        )
        decode = page.get_by_role("region", name="decode", exact=True).locator(
            ".card", has_text="pocket-chat"
        )
        await expect(decode.get_by_role("meter", name="KV cache used")).to_have_attribute(
            "aria-valuenow", re.compile(r"\d+")
        )
        await expect(decode).to_contain_text("tokens/s")
        tiles = page.get_by_role("list", name="Replies", exact=True)
        await expect(
            tiles.get_by_role("listitem").filter(has_text="Wait until a reply begins")
        ).to_contain_text(re.compile(r"95 % within [\d.]+ m?s"))
        cost = (
            tiles.get_by_role("listitem")
            .filter(has_text="Cost per million tokens")
            .locator("strong")
        )
        await expect(cost).to_have_text("–")
        await page.get_by_text("Limits", exact=True).click()
        await page.get_by_label("Price of all machines").fill("3.6")
        await page.get_by_label("Price of all machines").press("Tab")
        await expect(cost).to_have_text(re.compile(r"\d"))


async def test_a_waterfall_opens_by_keyboard(stack: MotetStack) -> None:
    async with at_the_stack(stack) as page:
        newest = page.get_by_role("button", name="pocket-chat").first
        await page.get_by_label("Order").focus()
        await page.keyboard.press("Tab")
        await expect(newest).to_be_focused()
        await page.keyboard.press("Enter")
        waterfall = page.get_by_role("table")
        await expect(waterfall.get_by_role("rowheader", name="prefill")).to_be_visible()
        stages = await waterfall.get_by_role("rowheader").all_text_contents()
        assert [stages[0], stages[-1]] == ["gateway", "first token"]
        assert {"tokenizer", "encode", "decode"} <= set(stages)
        await asyncio.sleep(3.5)  # it is drawn anew meanwhile
        await expect(newest).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(waterfall).to_be_hidden()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_all_is_named_and_can_be_read(stack: MotetStack, scheme: str) -> None:
    async with at_the_stack(stack, color_scheme=scheme) as page:
        await page.get_by_role("button", name="pocket-chat").first.click()
        assert await faults(page) == []
        await page.keyboard.press("Alt+c")
        assert await faults(page) == []
        await page.get_by_text("Settings", exact=True).click()
        assert await faults(page) == []
        await page.get_by_role("button", name="New chat").click()
        assert await faults(page) == []


@pytest.mark.long
async def test_a_phone_is_wide_enough(stack: MotetStack) -> None:
    async with at_the_stack(stack, viewport=PHONE) as page:
        await page.get_by_role("button", name="pocket-chat").first.click()
        assert await faults(page) == []
        await page.get_by_role("link", name="Chat").click()
        assert await faults(page) == []


@pytest.mark.long
async def test_colours_follow_the_system_until_they_are_chosen(stack: MotetStack) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    async with browsing(stack.url, color_scheme="dark") as page:
        dark = await page.evaluate(ground)
        await page.get_by_text("Settings", exact=True).click()
        await page.get_by_label("Colours").select_option("light")
        light = await page.evaluate(ground)
        assert dark != light
        await page.reload()
        assert await page.evaluate(ground) == light
        line = "getComputedStyle(document.body).getPropertyValue('--accent')"
        assert re.fullmatch(r"rgb\(.*\)", await page.evaluate(line))  # what a canvas can paint with


@pytest.mark.long
async def test_the_keyboard_reaches_everything(stack: MotetStack) -> None:
    async with browsing(stack.url) as page:
        await expect(page.get_by_placeholder("Message")).to_be_focused()
        await page.keyboard.press("Alt+s")
        await expect(page.get_by_role("heading", name="Stack")).to_be_focused()
        assert await page.title() == "Stack · Motet"
        await page.go_back()
        await expect(page.get_by_placeholder("Message")).to_be_focused()
        await page.reload()
        await expect(page.get_by_placeholder("Message")).to_be_focused()
        skip = page.get_by_role("link", name="Skip to the content")
        await page.locator("#conversations-toggle").focus()
        await page.keyboard.press("Shift+Tab")
        await expect(skip).to_be_focused()
        await expect(skip).to_be_in_viewport()
        await page.keyboard.press("Enter")
        await expect(page.get_by_placeholder("Message")).to_be_focused()
        await page.get_by_text("Settings", exact=True).press("Enter")
        await expect(page.get_by_label("System prompt")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_label("System prompt")).to_be_hidden()


@asynccontextmanager
async def at_a_keyed_gateway() -> AsyncIterator[tuple[Page, Bus]]:
    """The stack's view of a gateway that wants a key, before it was given one; and a decode instance's bus."""
    async with NatsServer() as nats, served_gateway(nats) as gateway:
        tokenizer, decode = (
            FakeTokenizer(None, await nats.bus("tokenizer")),
            FakeDecode(None, await nats.bus("decode")),
        )
        url = f"http://127.0.0.1:{gateway.port}/#stack"
        async with running(tokenizer), running(decode), browsing(url, refused=True) as page:
            yield page, decode.bus


async def give_key(page: Page) -> None:
    await page.get_by_role("button", name="Enter a key").click()
    await expect(page.get_by_label("API key")).to_be_focused()
    await page.keyboard.type(KEY)
    await page.keyboard.press("Enter")


async def test_with_keys_the_page_asks_for_one() -> None:
    async with at_a_keyed_gateway() as (page, _):
        problem = page.get_by_role("region", name="Stack").get_by_role("alert")
        decode = page.get_by_role("region", name="decode", exact=True)
        await expect(problem).to_contain_text("no API key was sent")
        await expect(decode).to_be_hidden()
        await give_key(page)
        await expect(decode).to_be_visible()
        await expect(problem).to_be_hidden()
        await page.get_by_role("button", name="Pause").click()
        await expect(page.get_by_role("button", name="Pause", pressed=True)).to_be_visible()


@pytest.mark.long
async def test_instances_are_seen_as_they_leave() -> None:
    async with at_a_keyed_gateway() as (page, bus):
        await give_key(page)
        decode = page.get_by_role("region", name="decode", exact=True)
        pulse = page.get_by_role("status", name="State of the stack")
        await expect(decode.locator(".state")).to_have_text("ready")
        await expect(pulse).to_have_text("3 instances, all ready")
        flow = page.get_by_role("list", name="Flow of requests").get_by_role("listitem")
        await expect(flow.filter(has_text="decode")).to_have_text("decode writes replies: idle")
        boxes, edges = page.locator(".flow .box"), page.locator(".flow .edge")
        await expect(boxes.locator(".name")).to_have_text(
            ["clients", "gateway", "tokenizer", "decode"]
        )
        await expect(edges).to_have_count(3)
        bus.set_state("draining")
        await expect(decode.locator(".state")).to_have_text("draining")
        await expect(pulse).to_have_text("3 instances; decode draining")
        await expect(flow.filter(has_text="decode")).to_contain_text("draining")
        await expect(page.locator(".flow .troubled .name")).to_have_text("decode")
        bus.set_state("stopped")
        await expect(decode).to_be_hidden()
        await expect(edges).to_have_count(2)


async def test_findings_are_told_with_the_knob_to_turn() -> None:
    finding = {
        "name": "tokenizer_bound",
        "what": "The tokenizer keeps requests waiting.",
        "layer": "L5",
        "layer_name": "text",
        "resource": "the tokenizer's event loop",
        "where": ["tokenizer-1f2e3d4c"],
        "numbers": {"loop_share": 0.97},
        "knob": "motet scale tokenizer=2",
        "severity": "critical",
        "cost": 3.2,
    }
    async with at_a_keyed_gateway() as (page, _):
        await give_key(page)
        found = page.get_by_role("region", name="What slows replies down")
        await expect(found).to_contain_text("Nothing was found.")
        answer = {"time": 1.0, "window_seconds": 10.0, "findings": [finding]}
        await page.route("**/metrics/doctor", lambda route: route.fulfill(json=answer))
        item = found.get_by_role("listitem")
        await expect(item).to_contain_text(
            "The tokenizer keeps requests waiting. Delays most requests."
        )
        await expect(item).to_contain_text("In text and connections: tokenizer-1f2e3d4c")
        await expect(item).to_contain_text("Suggested change: motet scale tokenizer=2")
        await item.get_by_text("Figures").click()
        await expect(item).to_contain_text("layer L5 (text) · loop share 0.97")
        await expect(item.locator("code")).to_have_text("motet scale tokenizer=2")
        assert await faults(page) == []
