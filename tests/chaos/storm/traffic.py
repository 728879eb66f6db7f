"""Clients of all kinds, which ask the same few questions again and again and record what they are told."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import websockets
from PIL import Image, ImageDraw

from chaos.storm.history import History, Told
from chaos.storm.stack import ASR_MODEL, BRUSH, CHAT, EYES, FILMS, OMNI, VECTORS, VOICE
from chaos.streams import Outcome, ask, request
from support.clients.realtime_client import TRANSCRIPTION, Client, sound
from support.media.spoken import say, silence, wav

PATIENCE = 90.0  # seconds after which an answer counts as lost
TOKENS = 120
_TRIES = 5
_SECOND = 48_000  # bytes of sound
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


Ask = Callable[[httpx.AsyncClient, int, Told], Coroutine[Any, Any, Any]]


def _checked(error: dict[str, Any], had: Any = None) -> Exception:
    return (
        Broken(error["code"], had)
        if error.get("code") in RETRYABLE
        else Wrong(json.dumps(error)[:300])
    )


async def _whole(
    http: httpx.AsyncClient, path: str, *, method: str = "POST", **body: Any
) -> httpx.Response:
    try:
        reply = await http.request(method, path, **body)
    except httpx.HTTPError as error:
        raise Broken(f"connection: {type(error).__name__}") from None
    if reply.status_code != 200:
        raise _checked(reply.json()["error"])
    return reply


# ------------------------------------------------------------------------------------------------------- the questions
async def chat(http: httpx.AsyncClient, number: int, told: Told) -> str:
    """Ask for a streamed chat or completion, greedy or sampled."""
    return await _text(http, request(number, CHAT, TOKENS), told)


async def seeing(http: httpx.AsyncClient, number: int, told: Told) -> str:
    """Ask for a streamed chat about a picture."""
    content = [
        {"type": "text", "text": "What is in the picture?"},
        {"type": "image_url", "image_url": {"url": _drawn(number)}},
    ]
    said = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    sampled = {"temperature": 0.8, "seed": number} if number else {"temperature": 0}
    return await _text(http, {"model": EYES, "stream": True, **said, **sampled}, told)


def _drawn(number: int) -> str:
    """Return a data URL of a picture of one shape."""
    canvas, file = Image.new("RGB", (64, 64), "white"), io.BytesIO()
    corner = 6 + 8 * number
    ImageDraw.Draw(canvas).ellipse((corner, corner, corner + 28, corner + 28), fill="red")
    canvas.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@asynccontextmanager
async def _streamed(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[httpx.Response]:
    """Open an answer that is read while it comes. Raises Broken or Wrong, within the block too."""
    try:
        async with http.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise _checked(reply.json()["error"])
            yield reply
    except httpx.HTTPError as error:
        raise Broken(f"connection: {type(error).__name__}") from None


async def _text(http: httpx.AsyncClient, body: dict[str, Any], told: Told) -> str:
    outcome = Outcome()
    await ask(http, body, outcome, lambda: told(len(outcome.text)))
    if outcome.error is not None:
        raise _checked(outcome.error, outcome.text)
    if outcome.broken or outcome.finish is None:
        raise Broken(f"connection: {outcome.broken or 'no end'}".partition(":")[0], outcome.text)
    return outcome.text


async def speech(http: httpx.AsyncClient, number: int, told: Told) -> bytes:
    body = {"model": VOICE, "input": _LINES[number], "response_format": "pcm", "seed": number}
    data = b""
    async with _streamed(http, "/v1/audio/speech", body) as reply:
        async for piece in reply.aiter_raw():
            data += piece
            told(len(data) / _SECOND)
    return data


async def transcript(http: httpx.AsyncClient, number: int, told: Told) -> str:
    """Where somebody speaks is found by the vad."""
    fields = {"model": ASR_MODEL, "language": "en", "chunking_strategy": '{"type": "server_vad"}'}
    files = {"file": ("said.wav", wav(silence(200) + say(_LINES[number]) + silence(200)))}
    return str(
        (await _whole(http, "/v1/audio/transcriptions", data=fields, files=files)).json()["text"]
    )


async def picture(http: httpx.AsyncClient, number: int, told: Told) -> str:
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


async def film(http: httpx.AsyncClient, number: int, told: Told) -> bytes:
    """Have a video made, which is queued once however often it is sent, and read its file."""
    said = {"model": FILMS, "prompt": _LINES[number], "seconds": 0.5, "size": "32x32", "steps": 10}
    key = f"{random.SystemRandom().getrandbits(64):x}"
    made = await _patient(
        "POST",
        http,
        "/v1/videos",
        json={**said, "seed": number},
        headers={"Idempotency-Key": f"{key}-make"},
    )
    path = f"/v1/videos/{made.json()['id']}"
    while (state := made.json())["status"] not in ("completed", "failed"):
        told(state["progress"])
        await asyncio.sleep(0.2)
        made = await _patient("GET", http, path)
    if state["status"] == "failed":
        raise _checked(state["error"])
    data = (await _patient("GET", http, f"{path}/content")).content
    await _patient("DELETE", http, path, headers={"Idempotency-Key": f"{key}-delete"})
    return data


async def _patient(method: str, http: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    """Send a request again while the answer says that it may be."""
    for _ in range(_TRIES):
        try:
            return await _whole(http, path, method=method, **body)
        except Broken as error:
            broken = error
            await asyncio.sleep(1.0)
    raise broken


async def spoken(http: httpx.AsyncClient, number: int, told: Told) -> tuple[str, bytes]:
    """Ask an omni model for a streamed reply of text and sound."""
    asked = {
        "model": OMNI,
        "messages": [{"role": "user", "content": _LINES[number]}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "pcm16"},
        "temperature": 0,
        "seed": number,
        "max_tokens": 40,
        "stream": True,
    }
    text, data, finish = "", b"", None
    async with _streamed(http, "/v1/chat/completions", asked) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise _checked(event["error"])
            choice = event["choices"][0]
            audio = choice["delta"].get("audio") or {}
            if "error" in audio:
                raise _checked(audio["error"])
            text += audio.get("transcript", "")
            data += base64.b64decode(audio.get("data", ""))
            told(len(data) / _SECOND)
            finish = choice["finish_reason"] or finish
    if finish is None:
        raise Broken("connection: no end")
    return text, data


async def embedding(http: httpx.AsyncClient, number: int, told: Told) -> str:
    """Ask for the vectors of some words."""
    body = {
        "model": VECTORS,
        "input": [f"t{1 + len(word) + number}" for word in _LINES[number].split()],
        "encoding_format": "base64",
    }
    found = (await _whole(http, "/v1/embeddings", json=body)).json()["data"]
    return " ".join(row["embedding"] for row in found)


async def conversation(http: httpx.AsyncClient, number: int, told: Told) -> tuple[str, str, bytes]:
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
    "seeing": (seeing, 1),
    "embedding": (embedding, 1),
    "film": (film, 1),
    "spoken": (spoken, 1),
}


# ---------------------------------------------------------------------------------------------------------- the clients
@dataclass
class Traffic:
    """Ask questions at one address, and record what comes."""

    url: str
    chance: random.Random
    history: History
    asking: int = 0

    async def learn(self) -> None:
        """Ask each question twice in a quiet time; raises where there is no answer."""
        async with _client(self.url) as http:
            for kind in KINDS:
                for number in range(VARIANTS):
                    for _ in range(2):
                        for _ in range(_TRIES):
                            if await self._ask(kind, number, http, quiet=True):
                                break
                        else:
                            raise RuntimeError(f"{kind} {number} has no answer in a quiet time")

    async def run(self, until: asyncio.Event, clients: int = 1) -> None:
        """Run so many clients per share of each kind until the event; then wait for their last answers."""
        async with asyncio.TaskGroup() as tasks:
            for kind, (_, share) in KINDS.items():
                for _ in range(share * clients):
                    tasks.create_task(
                        self._client(kind, until, random.Random(self.chance.random()))
                    )

    async def _client(self, kind: str, until: asyncio.Event, chance: random.Random) -> None:
        async with _client(self.url) as http:
            while not until.is_set():
                await self._ask(kind, chance.randrange(VARIANTS), http)
                await asyncio.sleep(chance.uniform(0.05, 0.5))

    async def _ask(
        self, kind: str, number: int, http: httpx.AsyncClient, *, quiet: bool = False
    ) -> bool:
        """Ask a question and record what comes of it; return whether it was answered."""
        asked = self.history.asked(kind, number, quiet=quiet)
        self.asking += 1
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await KINDS[kind][0](http, number, asked.told)
        except TimeoutError:
            self.history.failed(asked, "timeout", None, retryable=False)
        except Broken as broken:
            self.history.failed(asked, str(broken), broken.had, retryable=True)
        except Wrong as wrong:
            self.history.failed(asked, str(wrong), None, retryable=False)
        else:
            self.history.answered(asked, answer)
            return True
        finally:
            self.asking -= 1
        return False


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, verify=False)
