"""pocket-film as `motet up` offers it: loaded by the first request, from a terminal and on the page."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.async_api import expect

from e2e.browser.browser import browsing, eventually
from e2e.stack import MotetStack
from recipes.film.check import check
from recipes.film.scenes import FRAME_RATE, FRAMES, Actor
from recipes.world.pictures import SIZE

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "pocket-film"
PROMPT = "a red circle moves from left to right"
RED = Actor("circle", "red", "right")
OFF = [part for name in ("asr", "tts", "embed", "draw") for part in (f"--{name}", "none")]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("films")
    models = ("--llm", "pocket-chat", *OFF, "--vad", "0", "--film", MODEL)
    with MotetStack(folder, *models, "--store", str(folder / "store")) as stack:
        stack.wait_until_all_ready()
        yield stack


def frames_of(data: bytes) -> NDArray[np.uint8]:
    with av.open(io.BytesIO(data), "r") as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    return np.stack(frames).astype(np.uint8)


def listed(stack: MotetStack, what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{stack.url}/v1/{what}", timeout=60).json()["data"]
    return found


def status(stack: MotetStack) -> dict[str, str]:
    return {one["id"]: one["status"] for one in listed(stack, "models") if one["kind"] == "video"}


def test_motet_film_loads_the_model_and_writes_its_video(stack: MotetStack, tmp_path: Path) -> None:
    assert status(stack) == {MODEL: "unloaded"}
    written = []
    for seed in (3, 3, 4):
        out = tmp_path / "film.mp4"
        command = [sys.executable, "-m", "motet_cli", "film", PROMPT, "-o", str(out)]
        subprocess.run([*command, "--seed", str(seed), "--url", stack.url], check=True, timeout=120)
        written.append(out.read_bytes())
        assert status(stack) == {MODEL: "ready"}
    assert written[0] == written[1] != written[2]
    film = frames_of(written[0])
    assert film.shape == (FRAMES, SIZE, SIZE, 3)
    assert check(film, [RED]) == (True, "")


@pytest.mark.asyncio
async def test_the_page_shows_a_video_and_keeps_it(stack: MotetStack) -> None:
    async with browsing(stack.url) as page:
        await page.get_by_role("textbox", name="Message").fill(PROMPT)
        await page.get_by_role("button", name="Film", exact=True).click()
        width = "document.querySelector('article.assistant video')?.videoWidth"
        assert await eventually(page, width) == SIZE
        await expect(page.get_by_label(PROMPT, exact=True)).to_be_visible()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        duration = await page.evaluate("document.querySelector('video').duration")
        assert duration == pytest.approx(FRAMES / FRAME_RATE, abs=0.01)
        await page.reload()  # the conversation is stored with its video
        assert await eventually(page, width) == SIZE
        left = await asyncio.to_thread(listed, stack, "videos")
        assert left == [], "the page deletes what it has fetched"
