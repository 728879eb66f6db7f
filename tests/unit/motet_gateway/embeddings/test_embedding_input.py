"""What /v1/embeddings takes besides texts and token ids, and vectors of tokens in its answer."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from motet_shared.testing import memory_bus, running, settle
from support.clients.gateway_client import Http, World, world
from support.services.drawing_services import VECTORS, Embedder

PIXEL = base64.b64encode(b"a picture").decode()
URL = f"data:image/png;base64,{PIXEL}"
PART = {"type": "image_url", "image_url": {"url": URL}}


@asynccontextmanager
async def embedding(size: int = 0) -> AsyncIterator[World]:
    async with world(max_inputs=100) as here:
        service = Embedder(None, await memory_bus(here.hub, "embedding"))
        service.size = size
        async with running(service):
            await settle()
            yield here
        await here.service.close()


async def ask(here: World, **fields: Any) -> Http:
    body = {"model": VECTORS, "encoding_format": "float", **fields}
    return await Http(here.app, "/v1/embeddings", json.dumps(body).encode()).done()


async def test_texts_and_pictures_come_back_in_the_order_of_the_input() -> None:
    async with embedding() as here:
        given = [PART, "a", {"image": PIXEL}, {"type": "text", "text": "b"}, {"image": URL}]
        http = await ask(here, input=given)
        assert http.status == 200, http.body
        rows = [one["embedding"][0] for one in http.json()["data"]]
        assert rows == [2, 0, 3, 1, 4], "texts are 0 and 1, pictures come behind them"
        assert http.json()["usage"]["total_tokens"] == 25


async def test_a_message_is_one_part() -> None:
    async with embedding() as here:
        for content in ([PART], "a text", [{"type": "text", "text": "a"}]):
            http = await ask(here, messages=[{"role": "user", "content": content}])
            assert (http.status, len(http.json()["data"])) == (200, 1), http.body
        http = await ask(here, messages=[{"role": "user", "content": [PART, PART]}])
        assert (http.status, http.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([{"type": "text"}], "input[0]"),
        (["a", {"text": "b", "image": PIXEL}], "input[1]"),
        ([{"type": "image_url", "text": "b"}], "input[0]"),
        ([{"image": "data:text/plain;base64,AAAA"}], "input[0].image"),
        ([{"image": "ÿ"}], "input[0].image"),
        ([{"image_url": {"url": "http://example.org/a.png"}}], "input[0].image_url.url"),
        ([{"image_url": "ftp://x"}], "input[0].image_url"),
        ([5, PART], "input"),
        ([PART] * 65, "input"),
        (None, "input"),
    ],
)
async def test_what_is_no_input_is_named(given: Any, param: str) -> None:
    async with embedding() as here:
        http = await ask(here, input=given)
        assert (http.status, http.json()["error"]["param"]) == (400, param), http.body


async def test_vectors_of_tokens_are_lists_of_vectors() -> None:
    async with embedding(size=3) as here:
        http = await ask(here, input=["a", "b"])
        assert [one["embeddings"] for one in http.json()["data"]] == [
            [[float(index)] * 3] * 2 for index in range(2)
        ]
        http = await ask(here, input="a", encoding_format="base64")
        [one] = http.json()["data"]
        assert [base64.b64decode(text) for text in one["embeddings"]] == [
            struct.pack("<3f", 0, 0, 0)
        ] * 2
        assert "embedding" not in one
