"""A rolling restart of every service under load: each request completes, and says what it would have said."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from chaos.conftest import MODEL
from chaos.streams import Streams, request
from e2e import markov
from e2e.stack import ASR_MODEL, VOICE, MotetStack, speech
from e2e.stack import running as alive
from motet_media.audio import wav_header
from support.checkpoints import diffusion_checkpoints
from support.media.spoken import say

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]

BRUSH = "brush"
STREAMS, TOKENS = 4, 120
PAUSE = 0.2  # seconds between two requests of a kind: those that start need the cores as well


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """One of each service: nobody is there but the one that leaves and the one that comes."""
    folder = tmp_path_factory.mktemp("rolling")
    brush = diffusion_checkpoints.stable_diffusion(folder / BRUSH)
    model = markov.save(folder / MODEL)
    env = {"XDG_RUNTIME_DIR": str(folder), "MOTET_FALLBACK": "false"}
    with MotetStack(
        folder, "--llm", str(model), *speech(folder), "--draw", str(brush), env=env
    ) as made:
        made.wait_until_all_ready()
        yield made


def order(stack: MotetStack, *words: str) -> str:
    """What the command says; it must succeed."""
    argv = [sys.executable, "-m", "motet_cli", *words, "--url", stack.url]
    done = subprocess.run(
        argv, env=stack.env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Load:
    """Clients that ask the same again and again; `answers` are all that they got, by kind."""

    url: str
    answers: dict[str, list[bytes]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False) as http:
            kinds = (self.draw, self.speak, self.listen, self.look)
            tasks = [asyncio.create_task(self._repeat(kind, http)) for kind in kinds]
            tasks.append(asyncio.create_task(self._chat()))
            try:
                yield
            finally:
                self.over.set()
                await asyncio.gather(*tasks)

    async def _repeat(
        self, kind: Callable[[httpx.AsyncClient], Awaitable[bytes]], http: httpx.AsyncClient
    ) -> None:
        got = self.answers.setdefault(kind.__name__, [])
        while not self.over.is_set():
            try:
                got.append(await kind(http))
            except Exception as error:
                self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                return
            await asyncio.sleep(PAUSE)

    async def _chat(self) -> None:
        """Streams over connections of their own, until the end."""
        got = self.answers.setdefault("chat", [])
        while not self.over.is_set():
            async with Streams(
                self.url, [request(number, MODEL, TOKENS) for number in range(STREAMS)]
            ) as streams:
                outcomes = await streams.finish()
            self.failures += [
                f"chat: {o.error or o.broken}" for o in outcomes if o.error or o.broken
            ]
            got.append("\0".join(f"{o.finish} {o.text}" for o in outcomes).encode())

    async def draw(self, http: httpx.AsyncClient) -> bytes:
        body = {"model": BRUSH, "prompt": "a circle", "seed": 3, "steps": 6}
        reply = await http.post("/v1/images/generations", json=body)
        return base64.b64decode(_whole(reply).json()["data"][0]["b64_json"])

    async def speak(self, http: httpx.AsyncClient) -> bytes:
        body = {
            "model": VOICE,
            "input": "Two red circles, and a blue square.",
            "seed": 4,
            "response_format": "pcm",
        }
        return _whole(await http.post("/v1/audio/speech", json=body)).content

    async def listen(self, http: httpx.AsyncClient) -> bytes:
        pcm = say("Two red circles.")
        files = {"file": ("said.wav", io.BytesIO(wav_header(24000, len(pcm)) + pcm))}
        reply = await http.post(
            "/v1/audio/transcriptions", data={"model": ASR_MODEL, "language": "en"}, files=files
        )
        return _whole(reply).content

    async def look(self, http: httpx.AsyncClient) -> bytes:
        """Whatever is being restarted, the stack is ready."""
        reply = await http.get("/health/ready")
        return b"ready" if _whole(reply) else b""


def _whole(reply: httpx.Response) -> httpx.Response:
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.status_code} {reply.text[:300]}")
    return reply


async def test_every_service_is_replaced_and_nobody_notices(stack: MotetStack) -> None:
    before = {child["name"]: child["pid"] for child in stack.children()}
    load = Load(stack.url)
    async with load.running():
        while not all(
            load.answers.get(kind) for kind in ("chat", "draw", "speak", "listen", "look")
        ):
            assert not load.failures
            await asyncio.sleep(0.1)
        told = await asyncio.to_thread(order, stack, "restart")
    assert not load.failures
    after = {child["name"]: child["pid"] for child in stack.children()}
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] == after[name]] == ["nats"]
    assert [line.partition(":")[0] for line in told.splitlines()][-1] == "gateway"
    for kind, answers in load.answers.items():
        assert len(set(answers)) == 1, (
            f"{kind}: {len(set(answers))} different answers among {len(answers)}"
        )
    assert not any(alive(pid) for name, pid in before.items() if name != "nats")


async def test_more_and_fewer(stack: MotetStack) -> None:
    load = Load(stack.url)
    async with load.running():
        await asyncio.to_thread(order, stack, "scale", "tokenizer=2")
        assert sorted(child["name"] for child in stack.children("tokenizer")) == [
            "tokenizer",
            "tokenizer-2",
        ]
        await asyncio.to_thread(order, stack, "scale", "tokenizer=1")
    assert not load.failures
    assert [child["name"] for child in stack.children("tokenizer")] == ["tokenizer"]


def test_orders_that_cannot_be(stack: MotetStack) -> None:
    for words, named in (
        (("restart", "nats"), "ROLE: 'nats'"),
        (("scale", "decode=0"), "ROLE=N: decode=0"),
        (("scale", "decode"), "ROLE=N: 'decode'"),
    ):
        argv = [sys.executable, "-m", "motet_cli", *words, "--url", stack.url]
        done = subprocess.run(
            argv, env=stack.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert named in done.stderr
    other = {**os.environ, **stack.env, "XDG_RUNTIME_DIR": "/nonexistent"}
    argv = [sys.executable, "-m", "motet_cli", "restart", "--url", stack.url]
    done = subprocess.run(argv, env=other, capture_output=True, text=True, timeout=60, check=False)
    assert "--url: " in done.stderr
