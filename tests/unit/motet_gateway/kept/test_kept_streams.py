"""A gateway dies again and again within a stream of every kind: its client gets what it gets of one that lives."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from motet_gateway.kept.journal import JournaledStream
from motet_gateway.responses.store import ResponseStore
from motet_shared.messages import Chat, Complete, Text
from motet_shared.process.actor import Actor
from motet_shared.testing import memory_buses, running, settle
from support.clients.gateway_client import World, world
from support.media.sound_files import without_serial
from support.media.spoken import silence, wav
from support.services.drawing_services import BRUSH
from support.services.fake_services import MODEL, tool_call, words
from support.services.memory_documents import MemoryDocuments
from support.services.resuming_services import (
    FakeSpeakers,
    FakeVad,
    ResumingAsr,
    ResumingDiffusion,
    ResumingTts,
    epochs_of_speech,
)
from support.services.two_lives import Connection
from support.services.voice_services import ASR_MODEL, VOICE

LONG = " ".join(f"word{number}" for number in range(120))
DRAWS = "draw it"
_STORY = " ".join(f"Sentence number {number} has some words." for number in range(12))
_ROLES = ("tts", "asr", "vad", "speakers", "diffusion")


@dataclass(frozen=True)
class Stream:
    """A request, and what its answer says whatever it was cut into. `tears`: of how many bytes a death."""

    name: str
    path: str
    content: bytes
    said: Callable[[bytes], Any]
    content_type: str = "application/json"

    @property
    def request(self) -> bytes:
        """The bytes of the request, the last one of its connection."""
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: {self.content_type}\r\ncontent-length: {len(self.content)}\r\n\r\n"
        return head.encode() + self.content


def asked(name: str, path: str, said: Callable[[bytes], Any], **body: Any) -> Stream:
    return Stream(name, path, json.dumps(body).encode(), said)


# ------------------------------------------------------------------------------------------------------ what is said
def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each of one line of data."""
    found = []
    for event in body.removesuffix(b"\n\n").split(b"\n\n"):
        if event != b"data: [DONE]":
            found.append(json.loads(event.rpartition(b"data: ")[2]))
    return found


def chat(body: bytes) -> Any:
    assert body.endswith(b"data: [DONE]\n\n")
    found = events(body)
    assert len({(one["id"], one["created"]) for one in found}) == 1
    texts: dict[int, str] = {}
    rest = []
    for one in found:
        for choice in one["choices"]:
            index, delta = choice["index"], choice["delta"]
            texts[index] = texts.get(index, "") + (delta.pop("content", "") or "")
            rest += [delta] if delta else []
    return sorted(texts.items()), sorted(map(json.dumps, rest))


def response(body: bytes) -> Any:
    found = events(body)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    end = found[-1]["response"]
    (item,) = end["output"]
    text = "".join(one["delta"] for one in found if one["type"].endswith("text.delta"))
    assert {one["item_id"] for one in found if "item_id" in one} == {item["id"]}
    return text, item["content"][0]["text"], end["status"], end["usage"]


def message(body: bytes) -> Any:
    found = events(body)
    text = "".join(one["delta"].get("text", "") for one in found if "delta" in one)
    return text, [one["type"] for one in found if one["type"] != "content_block_delta"]


def lines(body: bytes) -> Any:
    found = [json.loads(line) for line in body.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    return "".join(
        one.get("response", "") or one.get("message", {}).get("content", "") for one in found
    )


def spoken(body: bytes) -> Any:
    *deltas, done = events(body)
    sound = b"".join(base64.b64decode(one["audio"]) for one in deltas)
    return sound, done["type"], done["words"], done["usage"]


def transcript(body: bytes) -> Any:
    return [{name: value for name, value in one.items()} for one in events(body)]


def drawn(body: bytes) -> Any:
    """Steps for which there was no credit are left out in an undisturbed run too; none comes twice."""
    found = events(body)
    steps = [one["step"] for one in found if "step" in one]
    assert steps == sorted(set(steps))
    return found[-1]["b64_json"], len({one.get("created_at") for one in found} - {None})


def _recording(**fields: str) -> tuple[bytes, str]:
    form = {"model": ASR_MODEL, "stream": "true", "language": "en", **fields}
    files = {"file": ("a.wav", wav(silence(300)))}
    request = httpx.Request("POST", "http://here/", data=form, files=files)
    return request.read(), request.headers["content-type"]


def _transcribed(name: str, **fields: str) -> Stream:
    content, content_type = _recording(**fields)
    return Stream(name, "/v1/audio/transcriptions", content, transcript, content_type)


_HELLO = [{"role": "user", "content": LONG}]
_SPEECH = {"model": VOICE, "input": _STORY}
STREAMS = [
    asked("chat", "/v1/chat/completions", chat, model=MODEL, stream=True, messages=_HELLO),
    asked("chat of 3", "/v1/chat/completions", chat, model=MODEL, stream=True, messages=_HELLO, n=3),
    asked(
        "chat that draws", "/v1/chat/completions", chat, model=MODEL, stream=True, seed=3,
        messages=[{"role": "user", "content": DRAWS}], modalities=["text", "image"],
    ),
    asked("response", "/v1/responses", response, model=MODEL, stream=True, input=LONG),
    asked("message", "/v1/messages", message, model=MODEL, stream=True, max_tokens=999, messages=_HELLO),
    asked("Ollama's chat", "/api/chat", lines, model=MODEL, messages=_HELLO),
    asked("Ollama's generate", "/api/generate", lines, model=MODEL, prompt=LONG),
    asked("sound", "/v1/audio/speech", bytes, **_SPEECH, response_format="pcm"),
    asked("mp3", "/v1/audio/speech", bytes, **_SPEECH, response_format="mp3"),
    asked("opus", "/v1/audio/speech", without_serial, **_SPEECH, response_format="opus"),
    asked("flac", "/v1/audio/speech", bytes, **_SPEECH, response_format="flac"),
    asked("speech events", "/v1/audio/speech", spoken, **_SPEECH, response_format="pcm", stream_format="sse"),
    _transcribed("transcript"),
    _transcribed("transcript of speech", chunking_strategy='{"type": "server_vad"}'),
    _transcribed("transcript of speakers", response_format="diarized_json", chunking_strategy="auto"),
    asked(
        "picture", "/v1/images/generations", drawn, model=BRUSH, prompt="a circle", size="64x64", seed=5,
        stream=True, partial_images=2, progress=True,
    ),
]  # fmt: skip


def reply(request: Chat | Complete) -> list[Text]:
    """Say what the user said; draw where that is asked for, and describe it."""
    if isinstance(request, Complete):
        return words(str(request.prompt))
    last = request.messages[-1]
    if last["content"] == DRAWS:
        return [*words("I will draw it now"), tool_call('{"prompt": "a circle"}')]
    return words(LONG if last["role"] == "tool" else str(last["content"]))


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=30.0) as made, AsyncExitStack() as stack:
        made.tokenizer.reply, made.tokenizer.pace = reply, 0.002
        buses = await stack.enter_async_context(memory_buses(*_ROLES, hub=made.hub))
        tts, asr, vad, speakers, diffusion = buses
        actors: list[Actor] = [
            ResumingTts(tts),
            ResumingAsr(asr),
            FakeVad(None, vad),
            FakeSpeakers(None, speakers),
            ResumingDiffusion(diffusion),
        ]
        for actor in actors:
            await stack.enter_async_context(running(actor))
        await settle()
        yield made
        await made.service.close()


async def answer(here: World, stream: Stream, deaths: Callable[[int], bool]) -> tuple[bytes, int]:
    """The body of the answer, whose framing is checked to the last byte, and how many gateways it took."""
    connection = Connection(here.app)
    try:
        got = await connection.ask(stream.request, deaths)
    finally:
        connection.close()
    fields, _, rest = got.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200"), got[:2000]
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not (count := int(size, 16)):
            assert rest == b"\r\n"
            return body, connection.lives
        assert rest[count : count + 2] == b"\r\n", "a chunk is not whole"
        body, rest = body + rest[:count], rest[count + 2 :]


def every(size: int) -> Callable[[int], bool]:
    """A death per `size` bytes received."""
    last = 0

    def due(received: int) -> bool:
        nonlocal last
        if received < last + size:
            return False
        last = received
        return True

    return due


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
async def test_a_stream_of_every_kind_goes_on(stream: Stream, here: World) -> None:
    whole, lives = await answer(here, stream, lambda received: False)
    assert lives == 1
    assert stream.said(whole)
    for parts in (3, 9):
        body, lives = await answer(here, stream, every(max(len(whole) // parts, 1)))
        assert lives > 1
        assert stream.said(body) == stream.said(whole)
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["chat", "chat of 3"])
async def test_plain_text_is_recorded_and_written_while_its_tasks_sleep(
    name: str, here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record of it has its effect at once, wherever its gateway dies."""
    (stream,) = (one for one in STREAMS if one.name == name)
    recorded = 0

    def append_now(journaled: JournaledStream, data: bytes) -> None:
        nonlocal recorded
        recorded += 1
        append(journaled, data)

    append = JournaledStream.append_now
    monkeypatch.setattr(JournaledStream, "append_now", append_now)
    whole, _ = await answer(here, stream, lambda received: False)
    assert recorded > 60
    for size in (len(whole) // 40, 997):
        recorded = 0
        body, lives = await answer(here, stream, every(size))
        assert lives > 3
        assert recorded > 0
        assert stream.said(body) == stream.said(whole)


async def test_choices_whose_client_reads_late_are_not_doubled(here: World) -> None:
    """The next gateway has more to send than it may before its handler has rendered the first batches again."""
    content = " ".join(letter * 30_000 for letter in "abcdef")
    said = [{"role": "user", "content": content}]
    path = "/v1/chat/completions"
    stream = asked("late", path, chat, model=MODEL, stream=True, messages=said, n=3)
    connection = Connection(here.app)
    connection.shrink()
    loop, got = asyncio.get_running_loop(), b""
    try:
        await connection.live()
        await loop.sock_sendall(connection.client, stream.request)
        for _ in range(2):
            await asyncio.sleep(0.2)
            await connection.die_and_live()
        await asyncio.sleep(0.1)
        while part := await loop.sock_recv(connection.client, 65536):
            got += part
    finally:
        connection.close()
    for letter in "abcdef":
        assert got.count(letter.encode() * 1000) == 3 * 30
    assert connection.lives == 3


async def test_each_gateway_ends_what_the_one_before_asked(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speech would be computed beside that which goes on, and change how that is rounded."""
    epochs = epochs_of_speech(monkeypatch)
    (sound,) = (stream for stream in STREAMS if stream.name == "sound")
    whole, _ = await answer(here, sound, lambda received: False)
    (first,) = epochs
    epochs.clear()
    _, lives = await answer(here, sound, every(len(whole) // 4))
    sessions, numbers = zip(*epochs, strict=True)
    assert len(set(sessions)) == 1
    assert sessions[0] not in ("", first.session)
    assert list(numbers) == sorted(set(numbers))
    assert numbers[-1] == lives - 1


async def test_a_response_in_the_background_is_created_once(here: World) -> None:
    """Its gateway dies between the queue and the answer; meanwhile another one has run it."""
    documents, pushed, torn = MemoryDocuments(), list[str](), asyncio.Event()
    store = here.service.responses = ResponseStore(documents, here.service.stored)

    async def push(job: str) -> int:
        pushed.append(job)
        if len(pushed) == 1:
            torn.set()
            await asyncio.Event().wait()
        return 1

    here.service.response_queue = SimpleNamespace(push=push)  # type: ignore[assignment]
    created = asked("background", "/v1/responses", bytes, model=MODEL, input="hi", background=True)
    connection = Connection(here.app)
    asking = asyncio.create_task(connection.ask(created.request, lambda received: False))
    await torn.wait()
    owner, _, response_id = pushed[0].rpartition(".")
    record = await store.get(owner, response_id)
    record.resource["status"] = "completed"
    await store.save(owner, record)
    await connection.die()
    await connection.live()
    answer = json.loads((await asking).partition(b"\r\n\r\n")[2])
    connection.close()
    assert (answer["id"], answer["status"]) == (response_id, "completed")
    assert (await store.get(owner, response_id)).status == "completed"
    assert len(set(pushed)) == 1
