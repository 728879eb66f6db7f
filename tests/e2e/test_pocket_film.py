"""pocket-film as `motet up` offers it: loaded by the first request, from a terminal and on the page."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
from playwright.async_api import expect

from e2e.browser.browser import browsing, eventually, set_seed
from e2e.stack import MotetStack
from recipes.film.check import Frames, check
from recipes.film.scenes import FRAME_RATE, FRAMES, Actor
from recipes.world.pictures import SIZE

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("pocket"),
]

PROMPT = "a red circle moves from left to right, a blue square stands still"
ACTORS = [Actor("circle", "red", "right"), Actor("square", "blue", "still")]
SEED = 3  # pocket-film is not always right (models/README.md)

# Returns the pixels of each frame that the page shows, as red, green, blue and opacity.
_FRAMES = """async ([count, rate]) => {
  const video = document.querySelector("article.assistant video");
  video.pause();
  const [width, height] = [video.videoWidth, video.videoHeight];
  const pen = Object.assign(document.createElement("canvas"), { width, height }).getContext("2d");
  const frames = [];
  for (let number = 0; number < count; number++) {
    const sought = new Promise((resolve) => video.addEventListener("seeked", resolve, { once: true }));
    video.currentTime = (number + 0.5) / rate;
    await sought;
    pen.drawImage(video, 0, 0);
    frames.push([...pen.getImageData(0, 0, width, height).data]);
  }
  return frames;
}"""


def frames_of(data: bytes) -> Frames:
    with av.open(io.BytesIO(data), "r") as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    return np.stack(frames).astype(np.uint8)


def models(stack: MotetStack) -> dict[str, str]:
    listed = httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]
    return {model["id"]: model["status"] for model in listed if model["kind"] == "video"}


def videos(stack: MotetStack) -> list[str]:
    listed = httpx.get(f"{stack.url}/v1/videos", timeout=60).json()["data"]
    return [video["id"] for video in listed]


def test_motet_film_loads_the_model_and_writes_what_was_asked(
    pocket: MotetStack, tmp_path: Path
) -> None:
    assert models(pocket) == {"pocket-film": "unloaded"}
    out = tmp_path / "film.mp4"
    command = [sys.executable, "-m", "motet_cli", "film", PROMPT, "-o", str(out)]
    subprocess.run([*command, "--seed", str(SEED), "--url", pocket.url], check=True, timeout=120)
    assert models(pocket) == {"pocket-film": "ready"}
    film = frames_of(out.read_bytes())
    assert film.shape == (FRAMES, SIZE, SIZE, 3)
    assert check(film, ACTORS) == (True, "")


@pytest.mark.asyncio
async def test_the_page_shows_a_video_and_keeps_it(pocket: MotetStack) -> None:
    async with browsing(pocket.url) as page:
        await set_seed(page, SEED)
        await page.get_by_role("textbox", name="Message").fill(PROMPT)
        await page.get_by_role("button", name="Film", exact=True).click()
        width = "document.querySelector('article.assistant video')?.videoWidth"
        assert await eventually(page, width) == SIZE
        frames = np.array(await page.evaluate(_FRAMES, [FRAMES, FRAME_RATE]), np.uint8)
        shown = frames.reshape(FRAMES, SIZE, SIZE, 4)[..., :3]
        assert check(shown, ACTORS) == (True, "")
        await expect(page.get_by_role("button", name="Send")).to_be_visible()
        await page.reload()  # the conversation is stored with its video
        assert await eventually(page, width) == SIZE
        assert await asyncio.to_thread(videos, pocket) == [], "the page deletes what it has fetched"
