"""Clients of all kinds, who ask the same few questions again and again and know what the answers must be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import websockets

from chaos.storm_stack import ASR_MODEL, BRUSH, CHAT, VOICE
from chaos.streams import Outcome, ask, request
from support.clients.realtime_client import TRANSCRIPTION, Client, sound
from support.media.spoken import say, silence, wav

PATIENCE = 90.0  # seconds after which an answer counts as lost
TOKENS = 120
_TRIES = 5
VARIANTS = 3  # different questions of each kind
_LINES = (
    "Two red circles and a blue square.",
    "Where is the small green star?",
    "It is above the triangle.",
)
# What a client may send again as it was. Everything else is the server's promise to have understood.
RETRYABLE = {"overloaded", "unavailable", "draining", "stream_broken", "worker_lost", "stream_gap"}


class Broken(Exception):
    """No answer this time, though the same question may be asked again. `had`: what had come of it."""

    def __init__(self, why: str, had: Any = None):
        super().__init__(why)
        self.had = had


class Wrong(Exception):
    """An answer that a client cannot make anything of."""


Ask = Callable[[httpx.AsyncClient, int], Awaitable[Any]]


def _checked(error: dict[str, Any], had: Any = None) -> Exception:
    return (
        Broken(error["code"], had)
        if error.get("code") in RETRYABLE
        else Wrong(json.dumps(error)[:300])
    )


async def _whole(http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    try:
        reply = await http.post(path, **body)
    except httpx.HTTPError as error:
        raise Broken(f"connection: {type(error).__name__}") from None
    if reply.status_code != 200:
        raise _checked(reply.json()["error"])
    return reply


# ------------------------------------------------------------------------------------------------------- the questions
async def chat(http: httpx.AsyncClient, number: int) -> str:
    """A streamed chat or completion, greedy or sampled."""
    outcome = Outcome()
    await ask(http, request(number, CHAT, TOKENS), outcome)
    if outcome.error is not None:
        raise _checked(outcome.error, outcome.text)
    if outcome.broken or outcome.finish is None:
        raise Broken(f"connection: {outcome.broken or 'no end'}".partition(":")[0], outcome.text)
    return outcome.text


async def speech(http: httpx.AsyncClient, number: int) -> bytes:
    body = {"model": VOICE, "input": _LINES[number], "response_format": "pcm", "seed": number}
    return (await _whole(http, "/v1/audio/speech", json=body)).content


async def transcript(http: httpx.AsyncClient, number: int) -> str:
    """Where somebody speaks is found by the vad."""
    fields = {"model": ASR_MODEL, "language": "en", "chunking_strategy": '{"type": "server_vad"}'}
    files = {"file": ("said.wav", wav(silence(200) + say(_LINES[number]) + silence(200)))}
    return str(
        (await _whole(http, "/v1/audio/transcriptions", data=fields, files=files)).json()["text"]
    )


async def picture(http: httpx.AsyncClient, number: int) -> str:
    body = {
        "model": BRUSH,
        "prompt": "two red circles",
        "size": "32x32",
        "steps": 12,
        "seed": number,
    }
    return str(
        (await _whole(http, "/v1/images/generations", json=body)).json()["data"][0]["b64_json"]
    )


async def conversation(http: httpx.AsyncClient, number: int) -> tuple[str, str, bytes]:
    """A spoken turn over a WebSocket: what was heard, what is answered, and how that sounds."""
    url = str(http.base_url).replace("http", "ws", 1).rstrip("/")
    try:
        async with websockets.connect(
            f"{url}/v1/realtime?model={CHAT}", proxy=None, max_size=None
        ) as socket:
            return await _turn(Client(socket), number)
    except (OSError, websockets.WebSocketException) as error:
        raise Broken(f"connection: {type(error).__name__}") from None


async def _turn(client: Client, number: int) -> tuple[str, str, bytes]:
    await _until(client, "session.created")
    heard = {"turn_detection": None, "transcription": {"language": "en"}}
    settings = {
        "type": "realtime",
        "temperature": 0,
        "max_output_tokens": 40,
        "audio": {"input": heard},
    }
    await client.send("session.update", session=settings)
    await _until(client, "session.updated")
    await client.audio(say(_LINES[number]))
    await client.send("input_audio_buffer.commit")
    await _until(client, f"{TRANSCRIPTION}.completed", f"{TRANSCRIPTION}.failed")
    if "error" in client.events[-1]:
        raise _checked(client.events[-1]["error"])
    await client.send("response.create")
    response = (await _until(client, "response.done"))["response"]
    if response["status"] == "failed":
        raise _checked(response["status_details"]["error"])
    said = next(event for event in client.events if event["type"] == f"{TRANSCRIPTION}.completed")[
        "transcript"
    ]
    content = response["output"][0]["content"][0]
    return said, content.get("transcript", f"not spoken: {content}"), sound(client.events)


async def _until(client: Client, *kinds: str) -> dict[str, Any]:
    while (event := await client.next())["type"] not in kinds:
        if event["type"] == "error":
            raise _checked(event["error"])
    return event


# Each with its share of the traffic.
KINDS: dict[str, tuple[Ask, int]] = {
    "chat": (chat, 4),
    "speech": (speech, 1),
    "transcript": (transcript, 1),
    "conversation": (conversation, 1),
    "picture": (picture, 1),
}


# ---------------------------------------------------------------------------------------------------------- the clients
@dataclass(frozen=True)
class Answer:
    """What became of a question. `verdict`: completed, broken (and may be asked again), lost, changed or wrong."""

    kind: str
    gateway: int
    began: float
    ended: float
    verdict: str
    detail: str = ""


@dataclass
class Traffic:
    """Questions to all gateways. `reference` holds the answers of a quiet time."""

    urls: list[str]
    chance: random.Random
    clock: Callable[[], float] = time.monotonic
    answers: list[Answer] = field(default_factory=list)
    reference: dict[tuple[str, int], Any] = field(default_factory=dict)
    asking: int = 0

    async def learn(self) -> None:
        """The answers of a quiet time, at the first gateway and at the last. RuntimeError where these differ."""
        for kind, (question, _) in KINDS.items():
            for number in range(VARIANTS):
                answers = []
                for url in (self.urls[0], self.urls[-1]):
                    async with _client(url) as http:
                        answers.append(await _insist(question, http, number))
                if answers[0] != answers[1] or not answers[0]:
                    raise RuntimeError(
                        f"{kind} {number} is answered in two ways, or not at all: nothing can be compared"
                    )
                self.reference[kind, number] = answers[0]

    async def run(self, until: asyncio.Event, clients: int = 1) -> None:
        """So many clients per share of each kind, until the event; then their last answers are waited for."""
        async with asyncio.TaskGroup() as tasks:
            for kind, (_, share) in KINDS.items():
                for _ in range(share * clients):
                    tasks.create_task(
                        self._client(kind, until, random.Random(self.chance.random()))
                    )

    async def _client(self, kind: str, until: asyncio.Event, chance: random.Random) -> None:
        gateways = [_client(url) for url in self.urls]
        try:
            while not until.is_set():
                gateway, number = chance.randrange(len(gateways)), chance.randrange(VARIANTS)
                self.answers.append(await self._ask(kind, number, gateway, gateways[gateway]))
                await asyncio.sleep(chance.uniform(0.05, 0.5))
        finally:
            for http in gateways:
                await http.aclose()

    async def _ask(self, kind: str, number: int, gateway: int, http: httpx.AsyncClient) -> Answer:
        began = self.clock()
        self.asking += 1
        verdict, detail = await self._judged(kind, number, http)
        self.asking -= 1
        return Answer(kind, gateway, began, self.clock(), verdict, detail)

    async def _judged(self, kind: str, number: int, http: httpx.AsyncClient) -> tuple[str, str]:
        due = self.reference[kind, number]
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await KINDS[kind][0](http, number)
        except TimeoutError:
            return "lost", f"{kind} {number}: no answer within {PATIENCE:g} s"
        except Broken as broken:
            if broken.had is not None and not due.startswith(broken.had):
                return "changed", f"{kind} {number}: began as {broken.had[-80:]!r}"
            return "broken", str(broken)
        except Wrong as wrong:
            return "wrong", f"{kind} {number}: {wrong}"
        return (
            ("completed", "")
            if answer == due
            else ("changed", f"{kind} {number}: {str(answer)[:200]!r}")
        )


async def _insist(question: Ask, http: httpx.AsyncClient, number: int) -> Any:
    """The answer, even where a slow machine takes a process for dead now and then."""
    for _ in range(_TRIES - 1):
        try:
            return await question(http, number)
        except Broken:
            await asyncio.sleep(1.0)
    return await question(http, number)


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, verify=False)
