"""Transcriptions by chat models that hear: what they are asked, what comes of it, what they refuse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet_shared.blobs.store import BlobStore
from motet_shared.errors import InternalError
from motet_shared.messages import Chat, ModelCard, Text
from motet_shared.testing import settle
from support.checkpoints.asr_checkpoints import noise, wav
from support.clients.gateway_client import Http, World, world
from support.services.fake_services import MODEL

SOUND = wav(noise(1.5))


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=0.2, upload_memory=1 << 20, max_upload=1 << 20) as made:
        card = ModelCard(name=MODEL, context=4096, audio=True)
        made.tokenizer.models = lambda: [card]  # type: ignore[method-assign]
        made.tokenizer.bus.heartbeat()
        await settle()
        made.tokenizer.reply = lambda request: [Text("Four", [1]), Text(" blue words.", [2, 3])]
        yield made
        await made.service.close()


def hear(here: World, task: str = "transcriptions", **fields: str) -> Http:
    form = {"model": MODEL, **fields}
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in form.items()
    ]
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = b"".join(parts) + head + SOUND + b"\r\n--x--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": str(len(body))}
    return Http(here.app, f"/v1/audio/{task}", body, "POST", headers)


async def test_the_model_is_given_the_file_and_asked_for_its_words(here: World) -> None:
    files: list[bytes] = []
    answered = here.tokenizer._answer

    async def reading(call: Any, request: Chat) -> None:
        async with BlobStore("tokenizer-reader") as store:
            files.extend(
                [bytes(await store.get(one.file, release=False)) for one in request.images]
            )
        await answered(call, request)

    here.tokenizer._answer = reading  # type: ignore[assignment]
    http = await hear(here, language="de", temperature="0.5").done()
    assert (http.status, http.json()["text"]) == (200, "Four blue words.")
    assert http.json()["usage"]["seconds"] == 2
    request = here.tokenizer.requests[-1]
    [message] = request.messages
    assert message["content"][0] == {"type": "audio"}
    assert "'de'" in message["content"][1]["text"]
    assert request.sampling.temperature == 0.5
    assert files == [SOUND]
    assert [(one.is_audio, one.param) for one in request.images] == [(True, "file")]
    store = await here.service.uploads()
    assert store.stats()["blobs"] == 0


async def test_translations_ask_for_english_and_are_greedy(here: World) -> None:
    http = await hear(here, "translations", response_format="verbose_json").done()
    body = http.json()
    assert (http.status, body["task"], body["duration"]) == (200, "translate", 1.5)
    assert [(one["start"], one["end"]) for one in body["segments"]] == [(0.0, 1.5)]
    request = here.tokenizer.requests[-1]
    assert "English" in request.messages[0]["content"][1]["text"]
    assert request.sampling.temperature == 0


async def test_text_comes_while_it_is_written(here: World) -> None:
    here.tokenizer.pace = 0.05
    http = await hear(here, stream="true").done()
    events = [
        json.loads(line.removeprefix("data: "))
        for line in http.body.decode().split("\n")
        if line.startswith("data: {")
    ]
    deltas = [one["delta"] for one in events if one["type"] == "transcript.text.delta"]
    assert deltas == ["Four", " blue words."]
    assert events[-1]["type"] == "transcript.text.done"
    assert events[-1]["text"] == "Four blue words."
    assert events[-1]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"prompt": "so"}, "prompt"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy"),
    ],
)  # fmt: skip
async def test_what_a_chat_does_not_do_is_refused_by_name(
    here: World, fields: dict[str, str], param: str
) -> None:
    http = await hear(here, **fields).done()
    assert (http.status, http.json()["error"]["param"]) == (400, param)
    assert not here.tokenizer.requests


async def test_a_model_that_is_deaf_is_named_as_a_chat_model(here: World) -> None:
    here.tokenizer.models = lambda: [ModelCard(name=MODEL, context=4096)]  # type: ignore[method-assign]
    here.tokenizer.bus.heartbeat()
    await settle()
    http = await hear(here).done()
    assert (http.status, http.json()["error"]["param"]) == (400, "model")


async def test_a_failure_is_told_and_leaving_is_a_cancel(here: World) -> None:
    here.tokenizer.error = InternalError("a bug")
    assert (await hear(here).done()).status == 500
    here.tokenizer.error, here.tokenizer.pace = None, 30.0
    http = hear(here, stream="true")
    async with asyncio.timeout(5):
        while not here.tokenizer.sent:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    http.leave()
    await http.done()
    await settle()
    assert here.tokenizer.cancelled == 1
    store = await here.service.uploads()
    assert store.stats()["blobs"] == 0
