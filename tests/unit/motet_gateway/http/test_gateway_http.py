"""The HTTP endpoints over a bus in memory: streams, refusals, clients that leave and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import motet_gateway
from motet_shared.errors import ContextTooLong, InternalError, Overloaded, WorkerLost
from motet_shared.messages import Chat, ModelCard, Text
from motet_shared.testing import memory_bus, running, settle
from support.clients.gateway_client import HELLO, ChunkedHttp, Http, World, world
from support.services.fake_services import MODEL, FakeEncoder, words


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=0.2) as made:
        yield made


# --------------------------------------------------------------------------------------------------------- streams
async def test_a_stream(here: World) -> None:
    http = await here.ask(stream=True, stream_options={"include_usage": True}).done()
    assert (http.status, http.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *events, last = http.events()
    assert last == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    assert http.text() == "You said: hello"
    assert len(chunks) == 1 + 3 + 1 + 1, "role, words, finish reason, usage"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    assert events[-1]["timing"].keys() >= {
        "gateway.total",
        "gateway.first",
        "tokenizer.encode",
        "decode.prefill",
    }
    assert http.complete


async def test_what_has_arrived_is_one_write_and_one_event_each(here: World) -> None:
    here.tokenizer.reply = lambda request: words("x" + " y" * 49)
    http = here.ask(stream=True)
    http.reading.clear()
    await settle(200)
    http.reading.set()
    await http.done()
    assert len([event for event in http.events() if event != "[DONE]"]) == 1 + 50 + 1
    assert len([chunk for chunk in http.chunks if chunk]) < 10


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({}, True),
        ({"n": 2}, True),
        ({"stream_options": {"include_usage": True}}, True),
        ({"include_reasoning": False}, True),
        ({"return_token_ids": True}, False),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
    ],
)
async def test_plain_text_is_written_while_the_tasks_of_its_replies_sleep(
    here: World, fields: dict[str, Any], is_plain: bool
) -> None:
    here.tokenizer.reply = lambda request: words("x" + " y" * 49)
    here.tokenizer.pace = 0.002
    expected = await here.ask(stream=True, **fields).done()
    body = {"model": MODEL, "messages": HELLO, "stream": True, **fields}
    http = ChunkedHttp(here.app, "/v1/chat/completions", json.dumps(body).encode())
    await http.done()
    assert by_choice(http) == by_choice(expected)
    if is_plain:
        assert http.written_now > 10
    else:
        assert http.written_now == 0


async def test_text_waits_for_a_client_that_does_not_read(here: World) -> None:
    here.tokenizer.reply = lambda request: words("x" + " y" * 149)
    here.tokenizer.pace = 0.002
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    http = ChunkedHttp(here.app, "/v1/chat/completions", json.dumps(body).encode())
    async with asyncio.timeout(10):
        while http.written_now < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        http.reading.clear()
        await asyncio.sleep(0.05)
        before = len(http.chunks)
        await asyncio.sleep(0.05)
        assert len(http.chunks) == before
        http.reading.set()
        await http.done()
    assert http.text() == "x" + " y" * 149


def by_choice(http: Http) -> dict[int, list[Any]]:
    """Return the choices of the events of a stream, by their index; neighbouring texts are joined."""
    found: dict[int, list[Any]] = {}
    for event in http.events():
        for choice in event["choices"] if event != "[DONE]" else ():
            rest = {name: value for name, value in choice.items() if name != "delta"}
            text = choice["delta"].pop("content", "")
            told = found.setdefault(choice["index"], [])
            if told and not choice["delta"] and told[-1][:2] == [rest, {}]:
                told[-1][2] += text
            else:
                told.append([rest, choice["delta"], text])
    return found


async def test_a_whole_body(here: World) -> None:
    http = await here.ask().done()
    reply = ChatCompletion.model_validate(http.json(), strict=True)
    assert reply.choices[0].message.content == "You said: hello"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 7
    assert "tokenizer.encode;dur=1.000" in http.headers["server-timing"]
    assert "gateway.total" in http.headers["server-timing"]


async def test_choices_are_streams_of_their_own(here: World) -> None:
    here.tokenizer.reply = lambda request: words(f"seed {request.sampling.seed}")
    whole = (await here.ask(n=3, seed=5).done()).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [
        "seed 5",
        "seed 6",
        "seed 7",
    ]
    http = await here.ask(n=3, seed=5, stream=True).done()
    texts = ["", "", ""]
    for event in http.events()[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == ["seed 5", "seed 6", "seed 7"]
    assert here.service.limits.active == 0


async def test_plain_completions(here: World) -> None:
    http = await here.ask("/v1/completions", prompt=["one two", "three"], n=2).done()
    assert [choice["text"] for choice in http.json()["choices"]] == [
        "one two",
        "one two",
        "three",
        "three",
    ]
    assert http.json()["usage"]["prompt_tokens"] == 14
    http = await here.ask("/v1/completions", prompt="one two", stream=True).done()
    assert [event["choices"][0]["text"] for event in http.events()[:-1]] == ["one", " two", ""]


async def test_the_request_id_comes_back_and_goes_on(here: World) -> None:
    http = Http(here.app, "/v1/chat/completions", _body(), headers={"x-request-id": "abc-1"})
    assert (await http.done()).headers["x-request-id"] == "abc-1"
    assert here.tokenizer.requests[-1].request_id == "abc-1"
    http = Http(here.app, "/v1/chat/completions", _body(), headers={"x-request-id": "a\tb"})
    assert (await http.done()).headers["x-request-id"].startswith("req_")


def _body(**fields: Any) -> bytes:
    return json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **fields}
    ).encode()


# -------------------------------------------------------------------------------------------------------- refusals
async def refusal(http: Http) -> tuple[int, str]:
    await http.done()
    error = http.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return http.status, error["code"]


async def test_refusals_before_any_work(here: World) -> None:
    assert await refusal(here.ask(model="gpt-99")) == (404, "model_not_found")
    assert await refusal(here.ask(bogus=1)) == (400, "unsupported_parameter")
    assert await refusal(Http(here.app, "/v1/chat/completions", b"{")) == (400, "malformed_message")
    assert await refusal(here.get("/v1/chat/completions")) == (405, "method_not_allowed")
    assert await refusal(here.get("/v1/nothing")) == (404, "not_found")
    assert await refusal(Http(here.app, "/v1/models", b"")) == (405, "method_not_allowed")
    assert not here.tokenizer.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLong("9000 tokens; the context holds 4096"), 400, "context_length_exceeded"),
        (Overloaded("full"), 429, "overloaded"),
        (InternalError("a bug"), 500, "internal"),
        (WorkerLost("decode-1 is gone"), 503, "worker_lost"),
    ],
)
async def test_errors_of_services_have_their_status(
    here: World, stream: bool, error: Any, status: int, code: str
) -> None:
    here.tokenizer.error = error
    http = here.ask(stream=stream)
    assert await refusal(http) == (status, code)
    assert http.json()["error"]["message"] == error.message
    assert ("retry-after" in http.headers) == (status in (429, 503))


async def test_an_error_within_a_stream_is_told_and_ends_it(here: World) -> None:
    here.tokenizer.error, here.tokenizer.fail_after = InternalError("a bug"), 2
    http = await here.ask(stream=True).done()
    assert http.status == 200
    assert http.complete
    assert http.text() == "You said:"
    assert http.events()[-1] == {
        "error": {"message": "a bug", "type": "server_error", "param": None, "code": "internal"}
    }


async def test_nobody_there_is_503() -> None:
    async with world(patience=0.0) as made:
        await made.buses[2].close()
        await made.buses[1].close()
        await settle()
        http = made.ask()
        assert await refusal(http) == (503, "unavailable")
        assert http.headers["retry-after"] == "1"


async def test_the_body_is_bounded() -> None:
    async with world(max_body=2000) as made:
        big = _body(user="x" * 3000)
        assert await refusal(Http(made.app, "/v1/chat/completions", big)) == (
            413,
            "payload_too_large",
        )
        told = Http(made.app, "/v1/chat/completions", b"", headers={"content-length": "3000"})
        assert await refusal(told) == (413, "payload_too_large")
        assert told.headers["connection"] == "close"


async def test_streams_are_bounded() -> None:
    async with world(max_streams=2) as made:
        made.tokenizer.pace = 60
        first, second = made.ask(stream=True), made.ask()
        await settle()
        third = made.ask()
        assert await refusal(third) == (429, "overloaded")
        assert third.headers["retry-after"] == "1"
        first.leave()
        await first.done()
        assert await refusal(made.ask(n=2)) == (429, "overloaded")
        second.leave()
        await second.done()
        assert made.service.limits.active == 0


async def test_a_draining_gateway_refuses(here: World) -> None:
    here.service.limits.draining = True
    assert await refusal(here.ask()) == (503, "draining")
    http = await here.get("/health/ready").done()
    assert (http.status, http.json()["missing"]) == (503, ["the gateway is stopping"])


# --------------------------------------------------------------------------------------------------------- clients
@pytest.mark.parametrize("fields", [{"stream": True}, {}, {"stream": True, "n": 3}])
async def test_who_leaves_cancels_at_once(here: World, fields: dict[str, Any]) -> None:
    here.tokenizer.pace = 60
    http = here.ask(**fields)
    await settle(50)
    count = len(here.tokenizer.requests)
    assert count == fields.get("n", 1)
    http.leave()
    await http.done()
    await settle(50)
    assert here.tokenizer.cancelled == count
    assert here.service.limits.active == 0
    here.service.bus.check_integrity()
    assert not here.service.bus.caller.streams


async def test_who_does_not_read_slows_only_himself(here: World) -> None:
    here.tokenizer.reply = lambda request: [Text(" x", [1])] * 1000
    deaf = here.ask(stream=True)
    deaf.reading.clear()
    await settle(100)
    stuck = here.tokenizer.sent
    assert stuck <= 64 + 64, "no more than the window is on its way"
    other = await here.ask(stream=True).done()
    assert len(other.text()) == 2000
    assert here.tokenizer.sent == stuck + 1000
    deaf.reading.set()
    await deaf.done()
    assert len(deaf.text()) == 2000


# ----------------------------------------------------------------------------------------------------- small pages
async def test_models(here: World) -> None:
    listed = (await here.get("/v1/models").done()).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    one = (await here.get(f"/v1/models/{MODEL}").done()).json()
    assert one == listed["data"][0]
    assert one["object"] == "model"
    assert await refusal(here.get("/v1/models/gpt-99")) == (404, "model_not_found")


async def test_health(here: World) -> None:
    assert (await here.get("/health/live").done()).status == 200
    ready = await here.get("/health/ready").done()
    assert (ready.status, ready.json()["models"]) == (200, [MODEL])
    assert ready.json()["speech"] == {"missing": ["asr", "vad", "tts"], "hears": False}
    assert ready.json()["images"] == {"missing": ["encoder"], "models": [MODEL]}
    async with running(FakeEncoder(None, await memory_bus(here.hub, "encoder"))):
        await settle()
        ready = await here.get("/health/ready").done()
        assert ready.json()["images"] == {"missing": [], "models": []}
        here.tokenizer.card = ModelCard(name=MODEL, context=4096, audio=True)
        here.tokenizer.bus.heartbeat()
        await settle()
        ready = await Http(here.app, "/health/ready", b"", "GET", query=f"model={MODEL}").done()
        assert ready.json()["speech"] == {"missing": ["vad", "tts"], "hears": True}
    await here.buses[2].close()
    await settle()
    ready = await here.get("/health/ready").done()
    assert (ready.status, ready.json()["missing"]) == (503, ["no decode is ready"])
    assert (await here.get("/health/live").done()).status == 200


async def test_metrics_count_requests_and_stages(here: World) -> None:
    await here.ask().done()
    text = (await here.get("/metrics").done()).body.decode()
    assert 'path="/v1/chat/completions"' in text
    assert "motet_completion_tokens_total{" in text
    assert 'stage="tokenizer.encode"' in text
    assert 'stage="gateway.first"' in text


async def test_the_page_asks_nobody_else(here: World) -> None:
    page = await here.get("/").done()
    assert page.status == 200
    policy = page.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "style-src 'self'"} <= set(policy)
    assert "require-trusted-types-for 'script'" in policy
    folder = Path(motet_gateway.__file__).parent / "web" / "static"
    for file in (path for path in folder.rglob("*") if path.is_file()):
        asset = await here.get(f"/{file.relative_to(folder)}").done()
        assert (asset.status, asset.headers["cache-control"]) == (200, "no-cache")
        if file.parent.name == "vendor":
            continue  # libraries name their home pages; the policy keeps them from going anywhere
        assert not re.search(
            rb"://|[\"'(]//", asset.body.replace(b"http://www.w3.org/2000/svg", b"")
        )
    assert await refusal(here.get("/../config.py")) == (404, "not_found")


# ------------------------------------------------------------------------------------------------------------- keys
async def test_keys() -> None:
    async with world(api_key="first-key\n\n second-key \n") as made:
        path = "/v1/chat/completions"
        assert await refusal(Http(made.app, path, _body())) == (401, "invalid_api_key")
        wrong = {"authorization": "Bearer nonsense"}
        assert await refusal(Http(made.app, path, _body(), headers=wrong)) == (
            401,
            "invalid_api_key",
        )
        for key in ("first-key", "second-key"):
            good = await Http(
                made.app, path, _body(), headers={"authorization": f"bearer {key}"}
            ).done()
            assert good.status == 200
        assert await refusal(made.get("/v1/models")) == (401, "invalid_api_key")
        assert await refusal(made.get("/metrics")) == (401, "invalid_api_key")
        assert (
            await made.get("/v1/models", {"authorization": "Bearer first-key"}).done()
        ).status == 200
        assert (await made.get("/").done()).status == 200
        assert (await made.get("/health/ready").done()).status == 200


async def test_without_keys_other_sites_may_not_ask(here: World) -> None:
    path, foreign = "/v1/chat/completions", {"origin": "https://elsewhere.example"}
    assert await refusal(Http(here.app, path, _body(), headers=foreign)) == (
        403,
        "forbidden_origin",
    )
    assert await refusal(here.get("/v1/models", foreign)) == (403, "forbidden_origin")
    own = await Http(here.app, path, _body(), headers={"origin": "http://here.localhost"}).done()
    assert own.status == 200


async def test_the_deadline_is_told() -> None:
    async with world(request_timeout=0.15) as made:
        made.tokenizer.pace = 60
        http = made.ask()
        async with asyncio.timeout(20):
            assert await refusal(http) == (504, "deadline_exceeded")


async def test_requests_carry_what_was_asked(here: World) -> None:
    await here.ask(temperature=0, stop="x").done()
    request = here.tokenizer.requests[-1]
    assert isinstance(request, Chat)
    assert (request.sampling.temperature, request.stop) == (0, ["x"])


# ------------------------------------------------------------------------------------------- reasoning
async def test_reasoning_is_asked_for_returned_and_left_out(here: World) -> None:
    here.tokenizer.reply = lambda request: [Text("", [1], reasoning="Hm."), Text("Yes.", [2])]
    options = {"enable_thinking": True}
    fields: dict[str, Any] = {"reasoning_effort": "low", "chat_template_kwargs": options}
    http = await here.ask(**fields).done()
    message = http.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    asked = here.tokenizer.requests[-1]
    assert (asked.reasoning_effort, asked.template_options) == ("low", options)
    for stream in (False, True):
        http = await here.ask(include_reasoning=False, stream=stream).done()
        assert b"Hm." not in http.body
        assert b"Yes." in http.body


async def test_reasoning_of_earlier_replies_goes_to_the_template(here: World) -> None:
    for name in ("reasoning_content", "reasoning"):
        history = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Yes.", name: "Hm."},
            {"role": "user", "content": "Why?"},
        ]
        assert (await here.ask(messages=history).done()).status == 200
        reply = here.tokenizer.requests[-1].messages[1]
        assert reply == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * 5000}}, "chat_template_kwargs"),
    ],
)
async def test_wrong_options_of_reasoning_are_named(
    here: World, fields: dict[str, Any], param: str
) -> None:
    http = await here.ask(**fields).done()
    assert (http.status, http.json()["error"]["param"]) == (400, param)
