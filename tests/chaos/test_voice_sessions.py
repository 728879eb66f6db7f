"""Sixteen conversations at once, interrupted and with services killed: nobody hears anything of anybody else."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from motet_shared.wire.subjects import role_of
from support.clients.realtime_client import TRANSCRIPTION, Client, sound, talking
from support.media.spoken import say, silence
from support.running.fork_server import ForkServer
from support.services.fake_services import MODEL
from support.services.marked_services import (
    BLOCK,
    BLOCKS_PER_MS,
    marked,
    read_marks,
    read_words,
    story,
)

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]

SESSIONS, TURNS = 16, 3
SHAPES, COLOURS = ("circle", "square", "triangle", "star"), ("red", "green", "blue", "yellow")
COUNTS = ("One", "Two", "Seven")
ROLES = {
    "asr": "support.services.marked_services",
    "tts": "support.services.marked_services",
    "tokenizer": "support.services.marked_services",
    "vad": "motet_vad",
}
HEARD = re.compile(r"speaker (\d+) from (\d+) to (\d+)")


def sentence(number: int, turn: int) -> str:
    """Another one for each session and turn."""
    colour, shape = COLOURS[number % 4], SHAPES[number // 4]
    return (
        f"{COUNTS[turn]} large {colour} pictures of a {shape}, please, and tell me all about them."
    )


@dataclass
class Stack:
    """The gateway runs here; two processes of everything else."""

    nats: NatsServer
    forks: ForkServer
    gateway: Gateway

    async def begin(self, role: str) -> None:
        argv = () if role == "vad" else (role, "--pace", "0.03")
        await self.forks.start(self.nats, ROLES[role], *argv)

    async def ready(self, count: int) -> None:
        await self.gateway.bus.directory.wait_for(
            lambda d: all(len(d.ready(role)) >= count for role in ROLES), 240
        )

    async def kill(self, role: str) -> int:
        """SIGKILL of the instance that serves most streams of this role; how many those are."""
        bus = self.gateway.bus
        while True:
            serving = [
                s.instance
                for s in bus.caller.streams.values()
                if s.instance and role_of(s.instance) == role
            ]
            if serving:
                victim = max(serving, key=serving.count)
                os.kill(
                    next(b.pid for b in bus.directory.instances(role) if b.instance == victim),
                    signal.SIGKILL,
                )
                await self.begin(role)
                return serving.count(victim)
            await asyncio.sleep(0.005)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    loaded = ForkServer("support.services.marked_services", "motet_vad.service")
    async with NatsServer() as nats, loaded as forks, AsyncExitStack() as exits:
        gateway = Gateway(
            GatewayConfig(port=0, drain_timeout=1.0, patience=60.0), await nats.bus("gateway")
        )
        await exits.enter_async_context(running(gateway))
        stack = Stack(nats, forks, gateway)
        await forks.start(nats, "support.services.marked_services", "decode")
        for role in [*ROLES, *ROLES]:
            await stack.begin(role)
        await stack.ready(2)
        yield stack


class Speaker:
    """One session: says a sentence per turn; interrupts some of the replies, and waits for the others."""

    def __init__(self, number: int, client: Client):
        self.number, self.client = number, client
        self._said = 0  # blocks
        self._interrupts = random.Random(number)

    async def run(self) -> None:
        for turn in range(TURNS):
            replies = self._count("response.created")
            await self._say(sentence(self.number, turn))
            await self._until(f"{TRANSCRIPTION}.completed", turn + 1)
            await self._until("response.created", replies + 1)
            if turn + 1 < TURNS and self._interrupts.random() < 0.5:
                await self._until(
                    "response.output_audio.delta", self._count("response.output_audio.delta") + 1
                )
            else:
                await self._until("response.done", replies + 1)

    async def _say(self, text: str) -> None:
        pcm = marked(silence(600) + say(text) + silence(900), self.number, self._said)
        self._said += len(pcm) // (2 * BLOCK)
        await self.client.audio(pcm)

    def _count(self, kind: str) -> int:
        return sum(event["type"] == kind for event in self.client.events)

    async def _until(self, kind: str, count: int) -> None:
        while self._count(kind) < count:
            await self.client.until(kind)


async def converse(stack: Stack, number: int, clients: dict[int, Client]) -> None:
    url = f"ws://127.0.0.1:{stack.gateway.port}/v1/realtime?model={MODEL}"
    async with talking(url, audio={"input": {"transcription": {}}}) as client:
        clients[number] = client
        await Speaker(number, client).run()


async def kill_some(stack: Stack, clients: dict[int, Client]) -> dict[str, int]:
    """One of each kind, in the thick of it; how many streams each held."""
    held = {}
    async with asyncio.timeout(200):
        for role in ("vad", "asr", "tokenizer", "tts"):
            before = progress(clients)
            held[role] = await stack.kill(role)
            while progress(clients) < before + SESSIONS // 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return held


def progress(clients: dict[int, Client]) -> int:
    """Transcripts and replies so far."""
    kinds = (f"{TRANSCRIPTION}.completed", "response.created")
    return sum(event["type"] in kinds for client in clients.values() for event in client.events)


def check(number: int, events: list[dict[str, Any]]) -> int:
    """All that one client has is his own; how many replies were cut short."""
    heard = [
        event["transcript"] for event in events if event["type"] == f"{TRANSCRIPTION}.completed"
    ]
    check_hearing(number, events, heard)
    cut = 0
    for done in (event["response"] for event in events if event["type"] == "response.done"):
        text = "".join(part["transcript"] for item in done["output"] for part in item["content"])
        assert any(story(transcript).startswith(text) for transcript in heard), (
            f"session {number}: {text}"
        )
        mine = [e for e in events if e.get("response_id") == done["id"]]
        spoken, written = read_words(sound(mine)), text.split()
        assert spoken[: len(written)] == written or written[: len(spoken)] == spoken, (
            f"session {number}: {spoken}"
        )
        if done["status"] == "completed":
            assert spoken == written
            assert any(story(transcript) == text for transcript in heard)
        else:
            assert (done["status"], done["status_details"]["reason"]) == (
                "cancelled",
                "turn_detected",
            )
            cut += 1
    return cut


def check_hearing(number: int, events: list[dict[str, Any]], heard: list[str]) -> None:
    """Each turn was heard once and whole: the stretch that its edges tell, of nobody else's sound."""
    stops = {
        e["item_id"]: e["audio_end_ms"]
        for e in events
        if e["type"] == "input_audio_buffer.speech_stopped"
    }
    starts = {
        e["item_id"]: e["audio_start_ms"]
        for e in events
        if e["type"] == "input_audio_buffer.speech_started"
    }
    assert len(heard) == len(stops) == TURNS, f"session {number}: {heard}"
    until = -1
    for transcript, (item_id, stop) in zip(heard, stops.items(), strict=True):
        found = HEARD.fullmatch(transcript)
        assert found, f"session {number}: {transcript}"
        speaker, first, last = map(int, found.groups())
        assert speaker == number
        assert until < first
        assert (first, last) == (
            max(until + 1, starts[item_id] * BLOCKS_PER_MS),
            stop * BLOCKS_PER_MS - 1,
        )
        until = last


async def test_nobody_hears_anybody_else(stack: Stack) -> None:
    clients: dict[int, Client] = {}
    async with asyncio.TaskGroup() as tasks:
        for number in range(SESSIONS):
            tasks.create_task(converse(stack, number, clients))
        killing = tasks.create_task(kill_some(stack, clients))
    held = killing.result()
    assert all(held.values())
    cut = [check(number, clients[number].events) for number in range(SESSIONS)]
    assert sum(cut) >= SESSIONS // 4, f"replies that were interrupted: {cut}"
    ids = [{e["item_id"] for e in client.events if "item_id" in e} for client in clients.values()]
    assert len(set().union(*ids)) == sum(map(len, ids)), "no item is told to two clients"
    stack.gateway.check_integrity()


def test_marks_tell_what_they_are_for() -> None:
    """The yardstick: a sound of two people, one with a hole and one that repeats are noticed."""
    one, two = marked(silence(100), 3), marked(silence(100), 4)
    assert read_marks(one) == "speaker 3 from 0 to 399"
    assert read_marks(one[1200:2400]) == "speaker 3 from 100 to 199"
    assert read_marks(one + two) == "speakers [3, 4] in one sound"
    assert read_marks(one[:1200] + one[2400:]) == "speaker 3 torn"
    assert read_marks(one[:1200] + one) == "speaker 3 torn"
