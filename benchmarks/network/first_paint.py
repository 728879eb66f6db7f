"""Measure how soon the page is painted and can be used in headless Chromium.

`python benchmarks/run.py first_paint --help`. NATS, tokenizer and gateway are real processes; the engine is a
fake one. Each round opens the page in a new context, whose cache is empty, and opens it again with
what it has cached, at a desktop's size and, with a processor that is slowed down, at a phone's. The
numbers go to `results/first_paint.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from playwright.async_api import Browser, Page, async_playwright

from benchmarks.stack.stack import motet_stack
from benchmarks.support.arguments import parser_of, planned
from benchmarks.support.document import conditions, load_line, write
from benchmarks.support.measures import Target, table, targets_table
from benchmarks.support.paths import RESULTS_FOLDER

RESULTS = RESULTS_FOLDER / "first_paint.json"
MAX_PAINT = 1.0  # seconds until the first paint on a desktop, with an empty cache
LOAD_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """Define a screen, and how many times slower than this machine its processor is."""

    name: str
    width: int
    height: int
    slowdown: float


DEVICES = (
    Device(name="desktop", width=1440, height=900, slowdown=1),
    Device(name="phone", width=390, height=844, slowdown=4),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Define how often each page is opened."""

    rounds: int = 20


QUICK = Plan(rounds=1)


@dataclass(kw_only=True)
class Findings:
    """Hold the loads of one device with an empty or a filled cache.

    painted, usable: seconds from the navigation to the first contentful paint, and until a message
    can be sent. files, bytes: requests of a load, and what they transferred.
    """

    device: str
    cache: str
    painted: list[float] = field(default_factory=list)
    usable: list[float] = field(default_factory=list)
    files: int = 0
    bytes: int = 0


async def measure(plan: Plan) -> list[Findings]:
    """Open the page on all devices, in turn, so that a change of the machine's load hits all."""
    found = [
        (device, [Findings(device=device.name, cache=cache) for cache in ("empty", "filled")])
        for device in DEVICES
    ]
    async with motet_stack() as stack, async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        try:
            for _ in range(plan.rounds):
                for device, (empty, filled) in found:
                    await _round(browser, f"http://127.0.0.1:{stack.port}/", device, empty, filled)
        finally:
            await browser.close()
    return [one for _, both in found for one in both]


async def _round(
    browser: Browser, url: str, device: Device, empty: Findings, filled: Findings
) -> None:
    """Open the page with an empty cache, then again."""
    context = await browser.new_context(
        viewport={"width": device.width, "height": device.height}, service_workers="block"
    )
    try:
        page = await context.new_page()
        session = await context.new_cdp_session(page)
        await session.send("Emulation.setCPUThrottlingRate", {"rate": device.slowdown})
        for findings in (empty, filled):
            await page.goto(url)
            await _note(page, findings)
            await page.goto("about:blank")
    finally:
        await context.close()


# The browser notes the paint after the frame; the model's choice is enabled when the page has the list of models.
_TIMES = """async () => {
  const wait = (ready) => new Promise((resolve) => {
    const look = () => (ready() ? resolve(performance.now()) : requestAnimationFrame(look));
    look();
  });
  const usable = await wait(() => !document.getElementById("model").disabled);
  const paint = () => performance.getEntriesByName("first-contentful-paint")[0];
  await wait(paint);
  const loads = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  const bytes = loads.reduce((sum, one) => sum + one.transferSize, 0);
  return { painted: paint().startTime, usable, files: loads.length, bytes };
}"""


async def _note(page: Page, findings: Findings) -> None:
    async with asyncio.timeout(LOAD_SECONDS):
        times: dict[str, Any] = await page.evaluate(_TIMES)
    findings.painted.append(times["painted"] / 1e3)
    findings.usable.append(times["usable"] / 1e3)
    findings.files, findings.bytes = times["files"], times["bytes"]


def targets(found: Sequence[Findings]) -> list[Target]:
    """Return the goal of a desktop with an empty cache."""
    return [Target("first paint on a desktop", median(found[0].painted), MAX_PAINT, "s")]


def report(found: Sequence[Findings]) -> str:
    """Return a table of all loads, in milliseconds."""
    header = ["device", "cache", "first paint", "most", "usable", "most", "files", "kB"]
    rows = [
        [one.device, one.cache, *_times(one), str(one.files), f"{one.bytes / 1e3:.0f}"]
        for one in found
    ]
    return table(header, rows)


def _times(found: Findings) -> list[str]:
    return [
        f"{1e3 * pick(seconds):.0f}"
        for seconds in (found.painted, found.usable)
        for pick in (median, max)
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, "one round", RESULTS)
    parser.add_argument("--rounds", type=int, help="times that the page is opened on each device")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    plan = planned(args, Plan(), QUICK)
    before = conditions()
    found = asyncio.run(measure(plan))
    print(report(found))
    print(targets_table(targets(found)))
    print(load_line(before))
    write(args.file, before, plan, found, targets(found))


if __name__ == "__main__":
    main()
