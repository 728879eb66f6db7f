"""Files and batches with the official client, in a real JetStream, answered by a scripted model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio

from motet_gateway.batches import runner
from motet_gateway.service import Gateway
from motet_shared.errors import BadRequest, Overloaded, Unavailable
from motet_shared.messages import BACKGROUND
from motet_shared.testing import NatsServer
from support.clients.batch_files import begin, chat_line, jsonl, lines_of, over, text_of
from support.services.fake_services import FakeTokenizer, echo, fake_services
from support.stages.served_gateway import Served, served_gateway
from support.stages.tenants_stage import ACME, OTHER, document

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@dataclass
class Stack:
    """A gateway with two tenants, and the model that it asks."""

    gateway: Gateway
    tokenizer: FakeTokenizer

    @asynccontextmanager
    async def client(self, key: str = ACME) -> AsyncIterator[openai.AsyncOpenAI]:
        async with Served(self.gateway).client(key) as made:
            yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("batches")
    tenants = folder / "tenants.toml"
    tenants.write_text(document("stored_bytes = 3000000\nconcurrent_streams = 1"))
    async with NatsServer(store=folder / "jetstream") as nats:
        buses = await nats.bus("tokenizer"), await nats.bus("decode")
        async with (
            fake_services(*buses) as tokenizer,
            served_gateway(nats, tenants_file=tenants, max_file=2_000_000) as gateway,
        ):
            await gateway.bus.directory.wait_for(lambda d: d.ready("tokenizer"), 10)
            yield Stack(gateway, tokenizer)
        for bus in buses:
            await bus.close()


@pytest.fixture
def stack(running_stack: Stack) -> Stack:
    tokenizer = running_stack.tokenizer
    tokenizer.reply, tokenizer.pace, tokenizer.error = echo, 0.0, None
    tokenizer.requests.clear()
    return running_stack


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with stack.client() as made:
        yield made


def refused(error: openai.APIStatusError) -> tuple[int, Any, Any]:
    return error.status_code, error.code, error.param


# --------------------------------------------------------------------------------------------------------------- files
async def test_a_file_of_several_parts_comes_back(client: openai.AsyncOpenAI) -> None:
    data = os.urandom(700_000)
    made = await client.files.create(
        file=("data.bin", data),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.bytes, made.filename, made.purpose) == (len(data), "data.bin", "user_data")
    assert made.expires_at == made.created_at + 3600
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == data
    assert (await client.files.delete(made.id)).deleted
    for gone in (client.files.retrieve(made.id), client.files.content(made.id)):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_files_are_listed_in_pages(client: openai.AsyncOpenAI) -> None:
    purposes: list[Any] = ["assistants", "evals", "assistants", "evals"]
    made = [
        await client.files.create(file=(f"{n}.txt", b"x"), purpose=purpose)
        for n, purpose in enumerate(purposes)
    ]
    ids = [file.id for file in made]
    assert [file.id async for file in client.files.list(limit=1)][:4] == ids[::-1]
    page = await client.files.list(order="asc", purpose="evals", limit=1)
    assert [file.id for file in page.data] == [ids[1]]
    assert page.has_more
    rest = await client.files.list(order="asc", purpose="evals", after=ids[1])
    assert [file.id for file in rest.data] == [ids[3]]
    assert not rest.has_more
    for name in ids:
        await client.files.delete(name)


async def test_wrong_uploads_are_refused(client: openai.AsyncOpenAI) -> None:
    file: Any = ("a.txt", b"x")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"purpose": "fun"}, "purpose"),
        ({"purpose": "batch", "extra_body": {"colour": "red"}}, "colour"),
        (
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 1}},
            "expires_after.seconds",
        ),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.create(file=file, **fields)
        assert caught.value.param == param
    with pytest.raises(openai.APIStatusError) as large:
        await client.files.create(file=("a", bytes(2_100_000)), purpose="batch")
    assert large.value.status_code == 413
    queries: list[dict[str, Any]] = [{"after": "file-" + "0" * 24}, {"limit": 0}]
    for query in queries:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.files.list(**query)
        assert caught.value.param == next(iter(query))


async def test_what_a_tenant_stores_is_bounded_and_its_own(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    data = os.urandom(1_800_000)
    mine = await client.files.create(file=("a", data), purpose="batch")
    with pytest.raises(openai.RateLimitError) as full:
        await client.files.create(file=("b", data), purpose="batch")
    assert refused(full.value)[1:] == ("insufficient_quota", "file")
    async with stack.client(OTHER) as other:
        assert (await other.files.list()).data == []
        for attempt in (
            other.files.retrieve(mine.id),
            other.files.content(mine.id),
            other.files.delete(mine.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.BadRequestError) as unknown:
            await other.batches.create(
                input_file_id=mine.id, endpoint="/v1/completions", completion_window="24h"
            )
        assert unknown.value.param == "input_file_id"
    await client.files.delete(mine.id)
    await asyncio.sleep(1.1)  # READ_EVERY of the quota
    again = await client.files.create(file=("b", data), purpose="batch")
    await client.files.delete(again.id)


async def test_uploads_that_end_at_once_are_bounded_together(client: openai.AsyncOpenAI) -> None:
    await asyncio.sleep(1.1)  # READ_EVERY of the quota
    data = os.urandom(1_800_000)
    uploads = (client.files.create(file=(name, data), purpose="batch") for name in "abcd")
    made = await asyncio.gather(*uploads, return_exceptions=True)
    stored = [one for one in made if not isinstance(one, BaseException)]
    assert len(stored) == 1
    assert sum(isinstance(one, openai.RateLimitError) for one in made) == 3
    await client.files.delete(stored[0].id)
    await asyncio.sleep(1.1)


# ------------------------------------------------------------------------------------------------------------- batches
async def test_a_batch_answers_each_line_once(stack: Stack, client: openai.AsyncOpenAI) -> None:
    lines = [chat_line(f"id-{n}", f"text {n}") for n in range(30)]
    lines.insert(7, chat_line("wrong", "x", temperature=9))
    lines.insert(9, chat_line("streamed", "x", stream=True))
    lines.insert(11, chat_line("unknown", "x", model="no-such-model"))
    made = await begin(client, jsonl(lines), metadata={"run": "1"})
    assert made.status == "validating"
    done = await over(client, made.id)
    assert (done.status, done.metadata) == ("completed", {"run": "1"})
    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (33, 30, 3)
    found = await lines_of(client, done.output_file_id)
    assert {line["custom_id"]: text_of(line) for line in found} == {
        f"id-{n}": f"You said: text {n}" for n in range(30)
    }
    assert len(found) == 30
    assert {line["response"]["status_code"] for line in found} == {200}
    errors = {
        line["custom_id"]: (
            line["response"]["status_code"],
            line["response"]["body"]["error"]["param"],
        )
        for line in await lines_of(client, done.error_file_id)
    }
    assert errors == {
        "wrong": (400, "temperature"),
        "streamed": (400, "stream"),
        "unknown": (404, "model"),
    }
    assert len(stack.tokenizer.requests) == 30
    assert {request.priority for request in stack.tokenizer.requests} == {BACKGROUND}
    assert {request.tenant for request in stack.tokenizer.requests} == {"batches/acme"}
    assert made.id in [batch.id async for batch in client.batches.list(limit=1)]
    output = await client.files.retrieve(done.output_file_id or "")
    assert output.purpose == "batch_output"


async def test_other_endpoints_of_batches(stack: Stack, client: openai.AsyncOpenAI) -> None:
    model = chat_line("", "")["body"]["model"]
    for url, body in (
        ("/v1/completions", {"model": model, "prompt": "go on"}),
        ("/v1/responses", {"model": model, "input": "hello"}),
    ):
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        made = await begin(client, jsonl([line]), url)
        done = await over(client, made.id)
        (answer,) = await lines_of(client, done.output_file_id)
        assert answer["response"]["status_code"] == 200
        if url == "/v1/responses":
            assert answer["response"]["body"]["store"] is False


async def test_a_wrong_file_fails_with_the_numbers_of_its_lines(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    good = chat_line("a", "x")
    data = jsonl([good]) + b"\n  \n" + b"{not json}\n" + jsonl([good])
    data += jsonl([{**good, "custom_id": "b", "url": "/v1/embeddings"}])
    data += jsonl([{**good, "custom_id": "c", "method": "GET"}])
    data += jsonl([{"custom_id": "d"}, {**good, "custom_id": "e", "body": [1]}])
    done = await over(client, (await begin(client, data)).id)
    assert done.status == "failed"
    assert done.errors is not None
    wrong = [(error.line, error.code, error.param) for error in done.errors.data or []]
    assert wrong == [
        (4, "invalid_json_line", None),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_url", "url"),
        (7, "invalid_request", "method"),
        (8, "invalid_request", "method"),
        (9, "invalid_request", "body"),
    ]
    listed = [line["error"]["line"] for line in await lines_of(client, done.error_file_id)]
    assert listed == [4, 5, 6, 7, 8, 9]
    assert not stack.tokenizer.requests
    empty = await over(client, (await begin(client, b"\n")).id)
    assert empty.errors is not None
    assert [error.code for error in empty.errors.data or []] == ["empty_file"]


async def test_errors_of_lines_are_short(client: openai.AsyncOpenAI) -> None:
    data = jsonl([{**chat_line("a", "x"), "n" * 300_000: 1}])
    data += jsonl([{**chat_line("b", "x"), "method": "n" * 300_000}])
    data += jsonl([{"custom_id": 1, "body": [[]] * 100_000}])
    done = await over(client, (await begin(client, data)).id)
    assert done.errors is not None
    found = done.errors.data or []
    assert [error.line for error in found] == [1, 2, 3]
    assert all(len(error.message or "") < 2_000 for error in found)
    assert all(len(error.param or "") < 2_000 for error in found)
    assert len(await lines_of(client, done.error_file_id)) == 3


async def test_lines_that_cannot_be_answered_hold_no_other_tenants_back(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    lines = jsonl(
        {
            "custom_id": f"{n}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "vectors", "input": "x"},
        }
        for n in range(40)
    )
    stuck = await begin(client, lines, "/v1/embeddings")  # nothing serves it
    async with asyncio.timeout(20):
        while (await client.batches.retrieve(stuck.id)).status != "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    async with stack.client(OTHER) as other:
        served = await begin(other, jsonl(chat_line(f"{n}", "x") for n in range(20)))
        done = await over(other, served.id, 20)
        assert done.request_counts is not None
        assert done.request_counts.completed == 20
    await client.batches.cancel(stuck.id)
    assert (await over(client, stuck.id)).status == "cancelled"


async def test_a_batch_that_is_not_stored_is_not_run(
    stack: Stack, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = stack.gateway.service
    assert service is not None
    assert service.batches is not None
    assert service.batch_queue is not None

    async def fails(owner: str, batch: Any) -> None:
        raise Unavailable("the gateway has died")

    listed = [batch.id async for batch in client.batches.list()]
    with monkeypatch.context() as patch:
        patch.setattr(service.batches, "save", fails)
        with pytest.raises(openai.InternalServerError):
            await begin(client.with_options(max_retries=0), jsonl([chat_line("a", "x")]))
    assert [batch.id async for batch in client.batches.list()] == listed
    monkeypatch.setattr(runner, "_STORED_WITHIN", 0.0)
    async with asyncio.timeout(20):
        while await service.batch_queue._listed("motet_batches"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert not stack.tokenizer.requests


async def test_errors_that_pass_are_tried_again(stack: Stack, client: openai.AsyncOpenAI) -> None:
    stack.tokenizer.error = Overloaded("full")
    made = await begin(client, jsonl([chat_line("a", "x")]))
    async with asyncio.timeout(20):
        while not stack.tokenizer.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    stack.tokenizer.error = None
    done = await over(client, made.id)
    (answer,) = await lines_of(client, done.output_file_id)
    assert text_of(answer) == "You said: x"


async def test_what_cannot_pass_is_an_error_of_its_line(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    stack.tokenizer.error = BadRequest("no", param="messages")
    done = await over(client, (await begin(client, jsonl([chat_line("a", "x")]))).id)
    assert (done.status, done.output_file_id) == ("completed", None)
    (answer,) = await lines_of(client, done.error_file_id)
    assert answer["response"]["body"]["error"]["param"] == "messages"


async def test_a_batch_is_cancelled(stack: Stack, client: openai.AsyncOpenAI) -> None:
    first = await begin(client, jsonl([chat_line("a", "x")]))
    await over(client, first.id)
    stack.tokenizer.pace = 0.2
    made = await begin(client, jsonl(chat_line(f"{n}", "one two three") for n in range(200)))
    async with asyncio.timeout(20):
        while len(stack.tokenizer.requests) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (await client.batches.cancel(made.id)).status == "cancelling"
    done = await over(client, made.id)
    assert done.status == "cancelled"
    found = await lines_of(client, done.output_file_id)
    assert done.request_counts is not None
    assert 0 < len(found) == done.request_counts.completed < 200
    assert (await client.batches.cancel(first.id)).status == "completed"


async def test_what_is_not_answered_in_its_window_expires(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    stack.tokenizer.pace = 0.2
    lines = jsonl(chat_line(f"{n}", "one two") for n in range(60))
    window: Any = "2s"
    done = await over(client, (await begin(client, lines, completion_window=window)).id)
    assert done.status == "expired"
    answered = {line["custom_id"] for line in await lines_of(client, done.output_file_id)}
    errors = await lines_of(client, done.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    late = {line["custom_id"] for line in errors}
    assert answered | late == {f"{n}" for n in range(60)}
    assert not answered & late
    assert answered


async def test_a_tenants_batches_leave_its_streams_alone(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    """With one stream at a time allowed, a batch of many lines does not take it."""
    stack.tokenizer.pace = 0.1
    made = await begin(client, jsonl(chat_line(f"{n}", "one two") for n in range(40)))
    async with asyncio.timeout(20):
        while len(stack.tokenizer.requests) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    line = chat_line("", "now")["body"]
    reply = await client.chat.completions.create(**line)
    assert reply.choices[0].message.content == "You said: now"
    await client.batches.cancel(made.id)
    await over(client, made.id)


async def test_wrong_batches_are_refused(stack: Stack, client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("a", b"{}"), purpose="batch")
    other = await client.files.create(file=("a", b"{}"), purpose="evals")
    good: Any = {
        "input_file_id": file.id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    for fields, param in (
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"input_file_id": "file-" + "0" * 24}, "input_file_id"),
        ({"input_file_id": other.id}, "input_file_id"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(**{**good, **fields})
        assert caught.value.param == param
    made = await begin(client, jsonl([chat_line("a", "x")]))
    async with stack.client(OTHER) as stranger:
        for attempt in (stranger.batches.retrieve(made.id), stranger.batches.cancel(made.id)):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert made.id not in [batch.id async for batch in stranger.batches.list()]
    await over(client, made.id)


async def test_replies_of_a_batch_are_not_among_those_whose_latency_counts(
    stack: Stack, client: openai.AsyncOpenAI
) -> None:
    recent = stack.gateway.service.metrics.recent  # type: ignore[union-attr]
    before = len(recent.last(1000))
    await over(client, (await begin(client, jsonl([chat_line("a", "x")]))).id)
    assert len(recent.last(1000)) == before
    await client.chat.completions.create(**chat_line("", "now")["body"])
    assert len(recent.last(1000)) == before + 1
