"""Headless Chromium for tests of the page: with a microphone that plays a file, and an ear at its loudspeaker."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from playwright.async_api import Page, async_playwright, expect

from e2e.stack import WAIT_SECONDS
from motet_media.audio import wav_header

RATE = 24000
GRANTED = "--use-fake-ui-for-media-stream"  # whoever asks for the microphone gets it
DEVICE = "--use-fake-device-for-media-stream"  # there is one
LOUD = 0.1  # of the tone that stands for a voice, which has 0.17
MILLISECONDS = WAIT_SECONDS * 1000
_BROKEN = re.compile(
    r"WebSocket connection|net::ERR_"
)  # what the browser says of a connection that broke
_REFUSED = re.compile(
    r"status of (401|503)"
)  # and of requests without a key, or while no model is ready

# Its visible problems and states.
_TOLD = """[...document.querySelectorAll("[role=alert], [role=status]")]
  .filter((element) => element.checkVisibility())
  .map((element) => element.innerText)"""

# Listens to what the page plays and to what it sends, without its knowledge.
_TAPS = """
(() => {
  const ears = [];
  const connect = AudioNode.prototype.connect;
  AudioNode.prototype.connect = function (to, ...rest) {
    if (to instanceof AudioDestinationNode) {
      const ear = this.context.createAnalyser();
      connect.call(this, ear);
      ears.push(ear);
    }
    return connect.call(this, to, ...rest);
  };
  const power = (ear) => {
    const samples = new Float32Array(ear.fftSize);
    if (ear.context.state === "closed") return 0; // it keeps what was heard last
    ear.getFloatTimeDomainData(samples);
    return Math.sqrt(samples.reduce((sum, x) => sum + x * x, 0) / samples.length);
  };
  window.loudness = () => Math.max(0, ...ears.map(power));
  window.pitch = () => {
    const ear = ears.reduce((a, b) => (power(b) > power(a) ? b : a));
    const bins = new Float32Array(ear.frequencyBinCount);
    ear.getFloatFrequencyData(bins);
    return (bins.indexOf(Math.max(...bins)) * ear.context.sampleRate) / ear.fftSize;
  };
  let voice = null;
  setInterval(() => {
    if (window.loudness() > LOUD) voice = { pitch: window.pitch() };
  }, 25);
  window.takeVoice = () => {
    const taken = voice;
    voice = null;
    return taken;
  };
  const contexts = [];
  window.AudioContext = class extends AudioContext {
    constructor(...options) {
      super(...options);
      contexts.push(this);
    }
  };
  window.contextStates = () => contexts.map(({ state }) => state);
  window.sent = { ms: 0, loudest: 0, types: [] };
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (text) {
    const { type, audio } = JSON.parse(text);
    if (audio) {
      const bytes = Uint8Array.from(atob(audio), (char) => char.charCodeAt(0));
      const samples = new Int16Array(bytes.buffer);
      window.sent.ms += samples.length / 24;
      window.sent.loudest = samples.reduce((most, x) => Math.max(most, Math.abs(x)), window.sent.loudest);
    } else window.sent.types.push(type);
    return send.call(this, text);
  };
})();
"""


def microphone(folder: Path, pcm: bytes, *, loop: bool = False) -> tuple[str, ...]:
    """Arguments with which `pcm` is what the microphone hears, from when it is opened; then silence, or it again."""
    path = folder / "microphone.wav"
    path.write_bytes(wav_header(RATE, len(pcm)) + pcm)
    file = f"{path}" if loop else f"{path}%noloop"
    return GRANTED, DEVICE, f"--use-file-for-fake-audio-capture={file}"


@asynccontextmanager
async def browsing(
    url: str, args: Sequence[str] = (), *, cut: bool = False, refused: bool = False, **options: Any
) -> AsyncIterator[Page]:
    """The page, which had no error by the end. `options`: of the context.

    cut: but for connections that broke. refused: but for requests without a key, or while no model is ready.
    """
    executable = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", *args]
        )
        page = await browser.new_page(**options)
        problems: list[str] = []
        failed: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "console", lambda line: problems.append(line.text) if line.type == "error" else None
        )
        page.set_default_timeout(MILLISECONDS)
        expect.set_options(timeout=MILLISECONDS)
        await page.add_init_script(_TAPS.replace("LOUD", str(LOUD)))
        page.on("requestfailed", lambda request: failed.append(f"{request.url}: {request.failure}"))
        await page.goto(url)
        try:
            yield page
        except BaseException as error:
            error.add_note(f"errors of the page: {problems}; failed requests: {failed}")
            raise
        finally:
            await browser.close()
        for allowed, pattern in ((cut, _BROKEN), (refused, _REFUSED)):
            problems = [told for told in problems if not (allowed and pattern.search(told))]
        assert not problems, problems


async def eventually(page: Page, condition: str) -> Any:
    """Return the first true value of a JavaScript expression, or of what a JavaScript function returns.

    Playwright's `wait_for_function` evaluates its later tries inside the page, which the page's own policy forbids.
    """
    give_up = time.monotonic() + WAIT_SECONDS
    while not (value := await page.evaluate(condition)):
        if time.monotonic() > give_up:
            told = await page.evaluate(_TOLD)
            raise AssertionError(f"{condition}: not within {WAIT_SECONDS:g} s; the page: {told}")
        await asyncio.sleep(0.02)
    return value


async def send(page: Page, text: str) -> None:
    """As one writes it."""
    await page.get_by_placeholder("Message").fill(text)
    await page.get_by_placeholder("Message").press("Enter")


async def set_seed(page: Page, seed: int) -> None:
    """Of all that is asked for from now on."""
    await page.get_by_text("Settings", exact=True).click()
    await page.get_by_label("Seed").fill(f"{seed}")
    await page.get_by_text("Settings", exact=True).click()
