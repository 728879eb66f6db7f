"""A broker that stands still, one that restarts, and the only worker of a kind killed at work: nothing is lost.

Everything is what `motet up` ships: one process of each role, and the models of `models/`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from e2e.stack import MotetStack
from support.clients.realtime_client import talking
from support.media.spoken import say, silence, wav

pytestmark = [pytest.mark.timeout(600)]

CHAT, SPEECH, HEARING, DRAW, EMBED = (
    "pocket-chat",
    "pocket-tts",
    "pocket-asr",
    "pocket-draw",
    "pocket-embed",
)
PAUSE = 5.0  # seconds
TEXT = "The quick brown fox jumps over the lazy dog near the river bank. " * 3
SENTENCES = (
    "There are two red circles and a blue square.",
    "How many circles are there?",
    "The green triangle is to the left of the yellow star.",
    "What colour is the square?",
    "Show me the red circle.",
)
WORDS = "show me the red circle and the blue square"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    models = ("--asr", HEARING, "--tts", SPEECH, "--draw", DRAW, "--embed", EMBED)
    with MotetStack(tmp_path_factory.mktemp("pauses"), *models) as running:
        running.wait_until_all_ready()
        yield running


@asynccontextmanager
async def client(stack: MotetStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        yield openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=120, http_client=http
        )


@dataclass
class Work:
    """One request of each pipeline, whose result depends on nothing but the request."""

    api: openai.AsyncOpenAI
    url: str

    async def chat(self) -> Any:
        """Replies one after the other, as pocket-chat says little."""
        return [await self._reply(f"Describe {number} red circles.") for number in range(20)]

    async def _reply(self, question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        stream = await self.api.chat.completions.create(
            model=CHAT, messages=messages, seed=7, stream=True
        )
        return "".join(
            [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        )

    async def speech(self) -> Any:
        reply = await self.api.audio.speech.create(
            model=SPEECH, voice="alloy", input=TEXT, response_format="pcm", extra_body={"seed": 5}
        )
        return reply.content

    async def transcription(self) -> Any:
        sound = wav(silence(800).join(say(sentence) for sentence in SENTENCES))
        reply = await self.api.audio.transcriptions.create(
            model=HEARING, file=("words.wav", sound), temperature=0
        )
        return reply.text

    async def image(self, steps: int = 100) -> Any:
        extra = {"seed": 3, "steps": steps}
        reply = await self.api.images.generate(
            model=DRAW, prompt="two red circles", response_format="b64_json", extra_body=extra
        )
        assert reply.data
        return reply.data[0].b64_json

    async def embedding(self) -> Any:
        found = [
            await self.api.embeddings.create(model=EMBED, input=[f"{number} red circles"])
            for number in range(30)
        ]
        return [one.data[0].embedding for one in found]

    async def realtime(self) -> Any:
        """What a spoken turn is understood as, and that a reply follows."""
        async with talking(self.url.replace("http", "ws") + "/v1/realtime?model=" + CHAT) as here:
            heard = {"transcription": {"model": HEARING}, "turn_detection": None}
            await here.update(audio={"input": heard}, output_modalities=["text"])
            await here.audio(say(WORDS))
            await here.send("input_audio_buffer.commit")
            done = await here.until("conversation.item.input_audio_transcription.completed")
            await here.send("response.create", response={"max_output_tokens": 64})
            reply = (await here.until("response.done"))[-1]["response"]
            return done[-1]["transcript"], reply["status"] in ("completed", "incomplete")

    async def all(self) -> list[Any]:
        kinds = (
            self.chat,
            self.speech,
            self.transcription,
            self.image,
            self.embedding,
            self.realtime,
        )
        return list(await asyncio.gather(*(kind() for kind in kinds)))


@pytest.fixture(scope="module")
def undisturbed(stack: MotetStack) -> list[Any]:
    """What `Work.all` returns when nothing happens meanwhile."""

    async def work() -> list[Any]:
        async with client(stack) as api:
            return await Work(api, stack.url).all()

    return asyncio.run(work())


async def test_a_pause_of_the_broker_is_waited_through(
    stack: MotetStack, undisturbed: list[Any]
) -> None:
    """5 s in which NATS does nothing for anybody, amid a reply of each pipeline."""
    async with client(stack) as api:
        work = Work(api, stack.url)
        running = asyncio.create_task(work.all())
        await asyncio.sleep(0.3)
        stack.signal("nats", signal.SIGSTOP)
        try:
            await asyncio.sleep(PAUSE)
            assert not running.done(), "the pause fell into the replies"
        finally:
            stack.signal("nats", signal.SIGCONT)
        assert await running == undisturbed


async def test_a_restart_of_the_broker_is_waited_through(
    stack: MotetStack, undisturbed: list[Any]
) -> None:
    async with client(stack) as api:
        work = Work(api, stack.url)
        running = asyncio.create_task(work.all())
        await asyncio.sleep(0.3)
        back = stack.kill("nats")
        assert await running == undisturbed
        await asyncio.to_thread(back)


async def test_the_only_worker_that_draws_is_killed(stack: MotetStack) -> None:
    """A picture waits for as long as its process takes to start again, and is the same."""
    async with client(stack) as api:
        work = Work(api, stack.url)
        due = await work.image(steps=200)
        running = asyncio.create_task(work.image(steps=200))
        await asyncio.sleep(0.5)
        assert not running.done()
        os.kill(int(stack.child("diffusion")["pid"]), signal.SIGKILL)
        assert await running == due
