"""/v1/embeddings as the official client sees it: a real gateway and nats-server, embedding services as processes."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from motet_shared.testing import NatsServer
from support.checkpoints.embedding_checkpoints import ids, means, sentence_transformer
from support.running.service_process import Process, service_process
from support.stages.served_gateway import KEY, Served, served_gateway

MODEL = "vectors"
COUNT = 400  # texts


@dataclass
class Service(Served):
    processes: list[Process]

    async def post(self, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(
            trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
        ) as http:
            return await http.post(
                f"{self.url}/v1/embeddings", json={"model": MODEL} | body, timeout=60
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_transformer(tmp_path_factory.mktemp("bert"), prompts={"query": "query: "})


@asynccontextmanager
async def serving(folder: Path, count: int = 1, *argv: str) -> AsyncIterator[Service]:
    options = ("--model", str(folder), "--name", MODEL, "--threads", "1", *argv)
    async with NatsServer() as nats, AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(service_process(nats, "motet_embedding", *options))
            for _ in range(count)
        ]
        async with served_gateway(nats, max_inputs=1500) as gateway:
            await gateway.bus.directory.wait_for(lambda d: len(d.ready("embedding")) == count, 300)
            yield Service(gateway, processes)


@pytest.mark.long
@pytest.mark.timeout(300)  # a process that imports torch
async def test_the_official_client_gets_its_vectors(folder: Path) -> None:
    texts = [ids(length, length) for length in (5, 40, 3)]
    due = means(folder, texts).numpy()
    async with serving(folder) as service, service.client() as client:
        answer = await client.embeddings.create(
            model=MODEL, input=texts
        )  # it asks for base64 by itself
        assert (answer.object, answer.model) == ("list", MODEL)
        assert [(one.object, one.index) for one in answer.data] == [
            ("embedding", index) for index in range(3)
        ]
        np.testing.assert_allclose([one.embedding for one in answer.data], due, atol=1e-5)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (48, 48)
        await _kinds_of_input(client, texts, due)
        await _encodings(service, texts, due)
        await _refused(service, client)
        models = await client.models.list()
        assert [(model.id, getattr(model, "kind", "")) for model in models.data] == [
            (MODEL, "embedding")
        ]


async def _kinds_of_input(client: openai.AsyncOpenAI, texts: list[list[int]], due: Any) -> None:
    one = await client.embeddings.create(
        model="text-embedding-3-small", input=texts[0], dimensions=5
    )
    assert one.model == MODEL, "OpenAI's names mean what is here"
    short = due[0, :5] / np.linalg.norm(due[0, :5])
    np.testing.assert_allclose(one.data[0].embedding, short, atol=1e-5)
    text = await client.embeddings.create(model=MODEL, input="ba be", encoding_format="float")
    texts_too = await client.embeddings.create(model=MODEL, input=["a", "ba be"])
    np.testing.assert_allclose(text.data[0].embedding, texts_too.data[1].embedding, atol=1e-5)
    assert (text.usage.prompt_tokens, texts_too.usage.prompt_tokens) == (4, 7)
    asked = await client.embeddings.create(
        model=MODEL, input="ba be", extra_body={"prompt_name": "query"}
    )
    assert asked.usage.prompt_tokens == 5


async def _encodings(service: Service, texts: list[list[int]], due: Any) -> None:
    numbers = (await service.post(input=texts)).json()["data"]
    assert isinstance(numbers[0]["embedding"][0], float)
    coded = (await service.post(input=texts, encoding_format="base64")).json()["data"]
    for number, code in zip(numbers, coded, strict=True):
        found = np.frombuffer(base64.b64decode(code["embedding"]), "<f4")
        assert found.tolist() == number["embedding"], "the very same numbers"


async def _refused(service: Service, client: openai.AsyncOpenAI) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": ["a", 5]}, 400, "input"),
        ({"input": [[5], "a"]}, 400, "input"),
        ({"input": [[]]}, 400, "input"),
        ({"input": [5, -1]}, 400, "input[1]"),
        ({"input": [100_000]}, 400, "input"),
        ({"input": ["a"] * 1501}, 400, "input"),
        ({"input": "a " * 200}, 400, "input"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions"),
        ({"input": "a", "dimensions": 33}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": "a", "prompt_name": "nobody"}, 400, "prompt_name"),
        ({"input": "a", "colour": "red"}, 400, "colour"),
        ({"input": "a", "model": "nobody"}, 404, "model"),
        ({}, 400, "input"),
    ]
    for body, status, param in wrong:
        reply = await service.post(**body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), (
            body,
            reply.text[:300],
        )
    with pytest.raises(openai.BadRequestError, match="96") as caught:
        await client.embeddings.create(model=MODEL, input=["a", "a " * 95])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.long
@pytest.mark.timeout(300)  # two processes that import torch
async def test_a_service_that_is_killed_costs_no_vector(folder: Path) -> None:
    """So many texts, a few tokens at a time, that the kill falls into the middle of them."""
    texts = [ids(3 + number % 40, number) for number in range(COUNT)]
    async with (
        serving(folder, 2, "--max-batch-tokens", "44") as service,
        service.client() as client,
    ):
        due = await client.embeddings.create(model=MODEL, input=texts)
        asking = asyncio.create_task(client.embeddings.create(model=MODEL, input=texts))
        directory = service.gateway.bus.directory

        def busy() -> list[Any]:
            return [
                beat
                for beat in directory.ready("embedding")
                if directory.outstanding(beat.instance)
            ]

        async with asyncio.timeout(30):
            while not busy():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        os.kill(busy()[0].pid, signal.SIGKILL)
        again = await asking
        assert again.usage == due.usage
        assert [one.index for one in again.data] == list(range(COUNT))
        both = [np.array([one.embedding for one in answer.data]) for answer in (due, again)]
        np.testing.assert_allclose(both[1], both[0], atol=1e-5)
        assert sum(process.returncode is None for process in service.processes) == 1
