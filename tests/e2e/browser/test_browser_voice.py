"""The page hears and speaks: Chromium whose microphone plays a file, the gateway and voice activity as processes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from e2e.browser.browser import DEVICE, GRANTED, browsing, eventually, microphone, send
from e2e.stack import fetch, until
from e2e.voice_stack import VoiceStack, voice_stack
from motet_shared.messages import Listen, ModelCard, Partial, Segment, Text, Usage
from motet_shared.process.actor import operation
from motet_shared.wire.call import Call
from support.media.spoken import say, silence
from support.services.fake_services import words
from support.services.voice_services import ASR_MODEL, WORD_MS, ScriptedAsr

pytestmark = [
    pytest.mark.long,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

HELLO = "Two red circles and a blue square."
ANSWER = "Here they are. Both of them are red, I think. I can draw you more, in any colour that you name."
STORY = "Once upon a time there was a king. " * 30
SORRY = "Sorry, I stop here. Tell me what you would like to hear, and I will tell you that instead of it."
DURATION = """(sound) => new Promise((done) => {
  const told = () => done(sound.duration);
  if (sound.readyState) told();
  else sound.addEventListener("loadedmetadata", told);
})"""
SLOW_MODULES = """() => {
  const add = AudioWorklet.prototype.addModule;
  AudioWorklet.prototype.addModule = async function (...given) {
    await new Promise((done) => setTimeout(done, 2000));
    return add.apply(this, given);
  };
}"""
STAGES = ["pause", "transcript", "first text", "first sound", "playback", "total"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[VoiceStack]:
    async with voice_stack() as made:
        yield made


@pytest.fixture
def stack(running: VoiceStack) -> VoiceStack:
    """As if it had just been started."""
    asr, tts, tokenizer = running.asr, running.tts, running.tokenizer
    asr.script, asr.heard, asr.requests, tts.pace, tts.requests, tokenizer.requests = (
        [],
        [],
        [],
        0.0,
        [],
        [],
    )
    asr.go_on.set()
    return running


def url(stack: VoiceStack) -> str:
    return f"http://127.0.0.1:{stack.port}"


def answers(stack: VoiceStack, **replies: str) -> None:
    """Let the model say these to messages that begin with such a word."""

    def reply(request: Any) -> list[Text]:
        return words(replies[request.messages[-1]["content"].split()[0]])

    stack.tokenizer.reply = reply


def chat(stack: VoiceStack) -> list[tuple[str, str]]:
    """What the model was asked last."""
    return [
        (message["role"], message["content"]) for message in stack.tokenizer.requests[-1].messages
    ]


async def talk(page: Page) -> None:
    await page.get_by_role("button", name="Talk", exact=True).click()
    await expect(page.get_by_role("region", name="Spoken conversation")).to_be_visible()


def state(page: Page) -> Locator:
    return page.get_by_role("status", name="Conversation")


async def heard(page: Page) -> float:
    """Wait for a voice, or be told of one since the page was last asked: its pitch in Hz."""
    pitch: float = (await eventually(page, "takeVoice()"))["pitch"]
    return pitch


async def silent(page: Page) -> None:
    await eventually(page, "loudness() < 0.001")
    await page.evaluate("takeVoice()")


async def understood(page: Page) -> None:
    """Wait until a whole word of the last message has been heard: of less, the conversation keeps nothing."""
    await eventually(
        page,
        "document.querySelector('article.assistant:last-of-type span:not(.ahead)')?.textContent",
    )


def bubbles(page: Page, role: str) -> Locator:
    return page.locator(f"article.{role} > {'.text' if role == 'assistant' else 'p'}")


@pytest.mark.parametrize("colours", ["light", "dark"])
async def test_a_spoken_turn(stack: VoiceStack, tmp_path: Path, colours: Any) -> None:
    stack.asr.script = ["two red circles"]
    answers(stack, two=ANSWER, And="Nothing else.")
    spoken = say(HELLO)
    args = microphone(tmp_path, silence(1500) + spoken + silence(1000))
    async with browsing(url(stack), args, color_scheme=colours) as page:
        await talk(page)
        await expect(bubbles(page, "user")).to_have_text("two red circles")
        assert await heard(page) == pytest.approx(440, abs=12)
        await expect(state(page)).to_contain_text("Speaking")
        await expect(bubbles(page, "assistant")).to_have_text(ANSWER)
        await expect(page.locator(".ahead")).to_be_empty()  # all of it was heard
        await silent(page)
        await expect(state(page)).to_contain_text("Listening")
        latency = page.get_by_role("group", name="Latency of this turn")
        assert await latency.locator("dt").all_text_contents() == STAGES
        figures = [
            int(text.removesuffix(" ms"))
            for text in await latency.locator("dd").all_text_contents()
        ]
        assert figures[0] >= 450  # the silence that ends a turn
        assert sum(figures[:-1]) == figures[-1]
        await page.get_by_role("button", name="End", exact=True).click()
        await expect(page.get_by_role("region", name="Spoken conversation")).to_be_hidden()
        await send(page, "And now?")  # what was said is known to what is written
        await expect(bubbles(page, "assistant").nth(1)).to_have_text("Nothing else.")
    assert chat(stack) == [
        ("user", "two red circles"),
        ("assistant", ANSWER),
        ("user", "And now?"),
    ]
    rate, pcm = stack.asr.heard[0]
    assert (rate, alike(pcm, spoken) > 0.5) == (24000, True)


def alike(pcm: bytes, other: bytes) -> float:
    """The correlation of the loudness of two sounds, in steps of 20 ms, where they fit best."""
    one, two = (_loudness(sound) for sound in (pcm, other))
    short, long = sorted((one, two), key=len)
    starts = range(len(long) - len(short) + 1)
    return max(
        float(np.corrcoef(short, long[start : start + len(short)])[0, 1]) for start in starts
    )


def _loudness(pcm: bytes) -> Any:
    samples = np.frombuffer(pcm, "<i2")[: len(pcm) // 960 * 480].astype(np.float64)
    return np.sqrt((samples.reshape(-1, 480) ** 2).mean(1))


@pytest.mark.parametrize(
    "pace", [pytest.param(0.15, id="while it is made"), pytest.param(0.0, id="while it plays")]
)
async def test_speech_interrupts_the_reply(stack: VoiceStack, tmp_path: Path, pace: float) -> None:
    """It falls silent at once, and page and server remember the same words: those that were heard."""
    stack.asr.script = ["tell me a story", "stop it"]
    answers(stack, tell=STORY, stop=SORRY)
    stack.tts.pace = pace
    args = microphone(
        tmp_path, silence(1500) + say(HELLO) + silence(6000) + say(HELLO) + silence(1000)
    )
    async with browsing(url(stack), args) as page:
        await talk(page)
        await heard(page)
        stack.asr.go_on.clear()
        await expect(state(page)).to_contain_text("You are speaking")
        await silent(page)
        stack.asr.go_on.set()
        await expect(bubbles(page, "assistant").nth(1)).to_have_text(SORRY)
        await heard(page)
        await expect(bubbles(page, "user")).to_have_text(["tell me a story", "stop it"])
        kept = await bubbles(page, "assistant").first.inner_text()
    assert STORY.startswith(kept.strip())
    assert 0 < len(kept.split()) < 7000 / WORD_MS + 10
    assert chat(stack) == [("user", "tell me a story"), ("assistant", kept), ("user", "stop it")]


class LiveAsr(ScriptedAsr):
    """Understands the first line of `script` while it is spoken: a word at once, the others when it may `go_on`."""

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=ASR_MODEL, context=0, live=True)]

    @operation(Listen)
    async def listen(self, call: Call, request: Listen) -> None:
        first, *others = self.script[0].split(" ")
        size = 0
        async for piece in call.received():
            if size == 0:
                await call.send(Partial(first, " perhaps"))
                await self.go_on.wait()
                await call.send(Partial(" ".join([first, *others]), ""))
            size += len(piece)
        await call.send(Segment(0, 0, 0.0, size / 2 / request.sample_rate, self.script[0]))
        call.finish("stop", Usage())


async def test_words_appear_while_they_are_spoken(tmp_path: Path) -> None:
    args = microphone(tmp_path, silence(1500) + say(HELLO) + silence(1000))
    async with voice_stack(LiveAsr) as stack, browsing(url(stack), args) as page:
        stack.asr.script = ["two red circles"]
        answers(stack, two="Here they are.")
        stack.asr.go_on.clear()
        await talk(page)
        await expect(bubbles(page, "user")).to_have_text("two")
        stack.asr.go_on.set()
        await expect(bubbles(page, "user")).to_have_text("two red circles")
        await expect(bubbles(page, "assistant")).to_have_text("Here they are.")
        assert not stack.asr.requests  # nothing was left to transcribe
    assert chat(stack) == [("user", "two red circles")]


async def test_a_model_that_hears_needs_no_recognizer(tmp_path: Path) -> None:
    """What was said is kept as sound: after a reload, it can be played, and the model gets it again."""
    args = microphone(tmp_path, silence(1500) + say(HELLO) + silence(1000))
    async with voice_stack(hearing=True) as stack, browsing(url(stack), args) as page:
        stack.tokenizer.reply = lambda request: words("Here they are.")
        await talk(page)
        await expect(bubbles(page, "assistant")).to_have_text("Here they are.")
        said = page.get_by_role("log").locator("audio")
        seconds = float(await said.evaluate(DURATION))
        assert seconds == pytest.approx(len(say(HELLO)) / 48000, abs=1.0)
        await expect(page.locator(".ahead")).to_be_empty()  # all of it was heard
        await silent(page)
        await page.get_by_role("button", name="End", exact=True).click()
        await page.locator("#conversation-list [aria-current]").wait_for()
        await page.reload()
        assert float(await said.evaluate(DURATION)) == seconds
        await send(page, "And now?")
        await expect(bubbles(page, "assistant").nth(1)).to_have_text("Here they are.")
    assert chat(stack) == [
        ("user", [{"type": "audio"}]),
        ("assistant", "Here they are."),
        ("user", "And now?"),
    ]
    assert [len(request.images) for request in stack.tokenizer.requests] == [1, 1]


async def test_without_a_voice_replies_are_written(tmp_path: Path) -> None:
    args = microphone(tmp_path, silence(1500) + say(HELLO) + silence(1000))
    async with voice_stack() as stack:
        stack.asr.script = ["two red circles"]
        answers(stack, two="Here they are.")
        await stack.tts.bus.close()
        await asyncio.to_thread(until, lambda: missing(stack) == ["tts"], "the gateway knows")
        async with browsing(url(stack), args) as page:
            await talk(page)
            await expect(bubbles(page, "user")).to_have_text("two red circles")
            await expect(bubbles(page, "assistant")).to_have_text("Here they are.")
            await expect(state(page)).to_contain_text("Listening")
            latency = page.get_by_role("group", name="Latency of this turn")
            assert await latency.locator("dt").all_text_contents() == [*STAGES[:3], STAGES[-1]]


def missing(stack: VoiceStack) -> Any:
    """What the gateway believes to lack for speech."""
    return fetch(f"{url(stack)}/health/ready").json()["speech"]["missing"]


async def test_a_text_and_the_keyboard_interrupt_too(stack: VoiceStack, tmp_path: Path) -> None:
    answers(stack, tell=STORY, more=STORY, enough="Very well.")
    async with browsing(
        url(stack), microphone(tmp_path, silence(1000)), color_scheme="dark"
    ) as page:
        await page.get_by_text("Settings").click()
        await page.locator("#voice-name").select_option("bass")
        await page.get_by_placeholder("Message").press("Tab")
        await page.get_by_role("button", name="Attach").press("Tab")
        await expect(page.get_by_role("button", name="Talk", exact=True)).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(state(page)).to_contain_text("Listening")
        await send(page, "tell me a story")
        await understood(page)
        await page.get_by_placeholder("Message").press("Escape")
        await silent(page)
        await expect(state(page)).to_contain_text("Listening")
        await send(page, "more")
        await understood(page)
        await send(page, "enough")
        await expect(bubbles(page, "assistant").last).to_have_text("Very well.")
        await expect(state(page)).to_contain_text("Listening")
        kept = await bubbles(page, "assistant").all_inner_texts()
    story, more, _ = kept
    assert chat(stack) == [
        ("user", "tell me a story"),
        ("assistant", story),
        ("user", "more"),
        ("assistant", more),
        ("user", "enough"),
    ]
    assert all(0 < len(text) < len(STORY) for text in (story, more))
    assert {request.voice for request in stack.tts.requests} == {"bass"}


async def test_a_muted_microphone_hears_nothing(stack: VoiceStack, tmp_path: Path) -> None:
    stack.asr.script = ["two red circles"]
    answers(stack, two="Yes.")
    loop = silence(4000) + say(HELLO) + silence(1000)
    async with browsing(url(stack), microphone(tmp_path, loop, loop=True)) as page:
        await talk(page)
        mute = page.get_by_role("button", name="Mute")
        await mute.click()
        await expect(mute).to_have_attribute("aria-pressed", "true")
        await expect(state(page)).to_contain_text("Muted")
        await page.evaluate("sent.ms = sent.loudest = 0")
        await eventually(page, f"sent.ms > {len(loop) / 48}")
        assert await page.evaluate("sent.loudest") == 0
        assert not stack.asr.requests
        await mute.click()
        await expect(bubbles(page, "user")).to_have_text("two red circles")


@pytest.mark.parametrize(
    ("arg", "words_said"),
    [
        pytest.param(DEVICE, "may not use the microphone. Allow it", id="refused"),
        pytest.param(GRANTED, "No microphone was found. Connect one", id="missing"),
    ],
)
async def test_a_microphone_that_cannot_be_used_is_told_in_words(
    stack: VoiceStack, arg: str, words_said: str
) -> None:
    async with browsing(url(stack), [arg]) as page:
        await page.get_by_role("button", name="Talk", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text(words_said)
        await expect(page.get_by_role("region", name="Spoken conversation")).to_be_hidden()
        assert not await page.evaluate("sent.types")
        await eventually(page, "String(contextStates()) === 'closed,closed'")


async def test_what_is_said_at_once_is_heard(stack: VoiceStack, tmp_path: Path) -> None:
    """Open the microphone only after the module that captures sound, which loads slowly here."""
    stack.asr.script = ["two red circles"]
    answers(stack, two="Here they are.")
    spoken = say(HELLO)
    args = microphone(tmp_path, silence(300) + spoken + silence(1000))
    async with browsing(url(stack), args) as page:
        await page.evaluate(SLOW_MODULES)
        await talk(page)
        await expect(bubbles(page, "assistant")).to_have_text("Here they are.")
    _, pcm = stack.asr.heard[0]
    assert len(pcm) > 0.9 * len(spoken)
    assert alike(pcm, spoken) > 0.5


async def test_a_connection_that_ends_is_told_in_words(stack: VoiceStack, tmp_path: Path) -> None:
    async with browsing(url(stack), microphone(tmp_path, silence(1000))) as page:
        sockets: list[Any] = []

        def passing(socket: Any) -> None:
            socket.connect_to_server()
            sockets.append(socket)

        await page.route_web_socket(re.compile("/v1/realtime"), passing)
        await talk(page)
        await sockets[0].close(code=1012)
        await expect(page.get_by_role("alert")).to_contain_text("The server restarts")
        await expect(page.get_by_role("region", name="Spoken conversation")).to_be_hidden()


async def test_a_telephone_is_wide_enough(stack: VoiceStack, tmp_path: Path) -> None:
    stack.asr.script = ["two red circles"]
    answers(stack, two="Here they are.")
    args = microphone(tmp_path, silence(1500) + say(HELLO) + silence(1000))
    async with browsing(
        url(stack), args, viewport={"width": 360, "height": 640}, has_touch=True
    ) as page:
        await page.get_by_role("button", name="Talk", exact=True).tap()
        await expect(page.get_by_role("group", name="Latency of this turn")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        for name in ("End", "Mute", "Send"):
            await expect(page.get_by_role("button", name=name, exact=True)).to_be_in_viewport(
                ratio=1
            )
