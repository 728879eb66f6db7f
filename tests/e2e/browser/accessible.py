"""What a page owes to those who do not see it as drawn, or not well: names for controls, contrast, room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.async_api import Page

LEAST_CONTRAST = 4.5  # of text and what is behind it, WCAG 2.2 level AA
_FAULTS = Path(__file__).with_name("faults.js").read_text()
_AXE = (Path(__file__).parents[2] / "support/javascript/vendor/axe.min.js").read_text()

# Of the accessibility tree, whose names are those that a screen reader says.
_CONTROLS = {
    "button", "link", "textbox", "combobox", "spinbutton", "checkbox", "meter", "DisclosureTriangle", "image",
}  # fmt: skip


async def faults(page: Page) -> list[str]:
    """What is wrong with what the page shows now; each as a sentence."""
    found: list[str] = await page.evaluate(f"{_FAULTS}({LEAST_CONTRAST})")
    return found + [f"a {role} has no name" for role in await _nameless(page)]


async def _nameless(page: Page) -> list[str]:
    session = await page.context.new_cdp_session(page)
    try:
        tree: dict[str, Any] = await session.send("Accessibility.getFullAXTree")
    finally:
        await session.detach()
    nodes = [node for node in tree["nodes"] if not node.get("ignored")]
    roles = [node["role"]["value"] for node in nodes if not node.get("name", {}).get("value")]
    return [role for role in roles if role in _CONTROLS]


async def violations(page: Page) -> list[str]:
    """Return what axe-core and `faults` find wrong with what the page shows now."""
    if not await page.evaluate("'axe' in window"):
        await page.evaluate(_AXE)
    found = await page.evaluate("axe.run()")
    named = [
        f"{one['id']}: {node['html'][:200]}" for one in found["violations"] for node in one["nodes"]
    ]
    return named + await faults(page)
