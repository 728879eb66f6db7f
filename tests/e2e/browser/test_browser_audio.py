"""What the page does with samples, by itself: conversion of rates, and the buffer in front of the loudspeaker."""

from __future__ import annotations

import functools
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Page

import motet_gateway
from e2e.browser.browser import browsing

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 24000
STATIC = Path(motet_gateway.__file__).parent / "web" / "static"


class _Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/favicon.ico":  # browsers ask for it by themselves
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """Where the page's files are, and nothing else."""
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Files, directory=str(STATIC))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(files: str) -> AsyncIterator[Page]:
    async with browsing(files + "icon.svg") as page:
        yield page


async def resampled(page: Page, samples: Any, rate: int) -> Any:
    script = """async ([samples, rate, block]) => {
        const { Resampler } = await import("/voice/resampler.js");
        const resampler = new Resampler(rate, 24000);
        const output = [];
        for (let at = 0; at < samples.length; at += block)
            output.push(...resampler.push(Float32Array.from(samples.slice(at, at + block))));
        return output;
    }"""
    return np.array(await page.evaluate(script, [samples.tolist(), rate, 128]))


@pytest.mark.long(after=2)
@pytest.mark.parametrize("rate", [8000, 16000, 24000, 44100, 48000, 96000])
async def test_the_rate_of_any_microphone_is_converted(page: Page, rate: int) -> None:
    """A tone stays the tone that it was; what 24 kHz cannot hold does not come back as another one."""
    time = np.arange(rate) / rate
    tone = await resampled(page, 0.5 * np.sin(2 * np.pi * 1000 * time), rate)
    assert len(tone) == pytest.approx(RATE, abs=100)
    steady = tone[1000:-1000]
    angles = 2 * np.pi * 1000 * np.arange(len(steady)) / RATE
    basis = np.stack([np.sin(angles), np.cos(angles)], 1)
    parts, *_ = np.linalg.lstsq(basis, steady, rcond=None)
    assert np.hypot(*parts) == pytest.approx(0.5, abs=0.002)
    assert np.abs(steady - basis @ parts).max() < 0.002
    if rate > 2 * 14_000:
        above = await resampled(page, 0.5 * np.sin(2 * np.pi * 14_000 * time), rate)
        assert np.abs(above[1000:-1000]).max() < 0.002


# `steps`: ["push", item, from, to] of one endless tone, ["end", item], ["stop"], ["render", samples].
_PLAY = """async (steps) => {
    const { JitterBuffer } = await import("/voice/jitter-buffer.js");
    const reports = [];
    const buffer = new JitterBuffer(24000, (report) => reports.push(report));
    const heard = [];
    const block = new Float32Array(128);
    const tone = (i) => 8000 * Math.cos((2 * Math.PI * 200 * i) / 24000);
    for (const [kind, ...rest] of steps) {
        if (kind === "render") {
            for (let n = 0; n < rest[0]; n += 128) {
                buffer.render(block);
                heard.push(...block);
            }
        } else if (kind === "push") {
            const [item, from, to] = rest;
            buffer.push(item, Int16Array.from({ length: to - from }, (_, i) => tone(from + i)));
        } else buffer[kind](...rest);
    }
    return [heard, reports.map(({ kind, item, played }) => [kind, item, played])];
}"""
_PEAK = 8000 / 32768
_STEP = _PEAK * 2 * np.pi * 200 / RATE  # the most that the tone changes from one sample to the next


async def played(page: Page, *steps: Any) -> tuple[Any, list[list[Any]]]:
    heard, reports = await page.evaluate(_PLAY, steps)
    return np.array(heard), reports


def edges(heard: Any) -> float:
    """The steepest change of the sound, as a multiple of the tone's own."""
    return float(np.abs(np.diff(heard, prepend=0.0)).max() / _STEP)


def without_progress(reports: list[list[Any]]) -> list[list[Any]]:
    return [report for report in reports if report[0] != "progress"]


async def test_nothing_is_lost_on_the_way(page: Page) -> None:
    """In pieces of odd sizes, more than the ring holds at first, one message after the other."""
    size, pieces = 1237, 300
    steps = [["push", "a", at * size, (at + 1) * size] for at in range(pieces)]
    heard, reports = await played(
        page,
        *steps,
        ["push", "b", pieces * size, pieces * size + 5000],
        ["end", "b"],
        ["render", 400_000],
    )
    whole = pieces * size + 5000
    tone = _PEAK * np.cos(2 * np.pi * 200 * np.arange(whole) / RATE)
    assert np.abs(heard[200:whole] - tone[200:]).max() < 1e-4
    assert np.abs(heard[whole + 500 :]).max() < 1e-4
    ended = [
        ["started", "a", 128],
        ["ended", "a", pieces * size],
        ["started", "b", pytest.approx(64, abs=64)],
    ]
    assert without_progress(reports) == [*ended, ["ended", "b", 5000]]


@pytest.mark.parametrize("size", [100, 128, 3 * 128, 3 * 128 + 1])
async def test_one_message_after_another(page: Page, size: int) -> None:
    """Also where one ends just as the samples that are asked for do."""

    def message(item: str) -> list[list[Any]]:
        return [["push", item, 0, size], ["end", item], ["render", 1024]]

    heard, reports = await played(page, *message("a"), *message("b"))
    assert [report for report in reports if report[0] == "ended"] == [
        ["ended", "a", size],
        ["ended", "b", size],
    ]
    assert np.array_equal(heard[:1024], heard[1024:])


async def test_it_begins_when_there_is_enough_or_no_more_to_come(page: Page) -> None:
    heard, _ = await played(
        page, ["push", "a", 0, 1900], ["render", 4000], ["push", "a", 1900, 2000], ["render", 128]
    )
    assert not heard[:4000].any()
    assert heard[-128:].any()
    heard, reports = await played(page, ["push", "a", 0, 300], ["end", "a"], ["render", 512])
    assert heard.any()
    assert reports == [["started", "a", 128], ["ended", "a", 300]]


async def test_running_dry_makes_no_click_and_next_time_it_waits_for_more(page: Page) -> None:
    """Twice as much, and less again after a message without a gap."""
    steps: list[Any] = [["push", "a", 0, 1930], ["render", 4096]]
    steps += [
        ["push", "a", 1930, 4900],
        ["render", 4096],
        ["push", "a", 4900, 5880],
        ["end", "a"],
        ["render", 8192],
    ]
    steps += [
        ["push", "b", 0, 3500],
        ["render", 1024],
        ["push", "b", 3500, 3950],
        ["end", "b"],
        ["render", 8192],
    ]
    steps += [["push", "c", 0, 3500], ["render", 1024]]
    heard, reports = await played(page, *steps)
    assert [report for report in reports if report[0] == "underrun"] == [["underrun", "a", 1930]]
    loud = [bool(np.abs(heard[at : at + 1024]).max() > 0.01) for at in range(0, len(heard), 1024)]
    assert loud == [
        *(True, True, False, False),
        *(False, False, False, False),  # 2970 are too few now
        *(True, True, True, True, False, False, False, False),
        False,  # so are 3500
        *(True, True, True, True, False, False, False, False),
        True,  # enough again
    ]
    assert edges(heard) < 2


@pytest.mark.parametrize("at", [64, 2048, 4096, 5000])
async def test_a_stop_is_silence_without_a_click(page: Page, at: int) -> None:
    heard, reports = await played(
        page, ["push", "a", 0, 4100], ["render", at], ["stop"], ["render", 2000],
        ["push", "b", 4100, 8000], ["end", "b"], ["render", 6000],
    )  # fmt: skip
    rendered = -(-at // 128) * 128
    told = without_progress(reports)
    assert ["stopped", "a", min(rendered, 4100)] in told
    assert not np.abs(heard[rendered + 300 : rendered + 2000]).max() > 1e-3
    assert edges(heard) < 2
    assert told[-2:] == [["started", "b", 128], ["ended", "b", 3900]]
