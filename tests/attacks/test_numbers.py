"""Numbers that no computer word holds, in every place of a request: 400 that names the field, never 500."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from motet_gateway.openai.requests import chat_requests
from motet_gateway.openai.schema import ChatBody
from support.clients.gateway_client import HELLO, Http, World, session, world
from support.services.fake_services import words

HUGE = [
    "1e30",
    "1" + "0" * 30,
    "-1" + "0" * 30,
    "1e400",
    "1" + "0" * 400,
    str(2**63),
    str(2**64),
    "1.5",
    "-1e30",
]
NO_JSON = ["NaN", "Infinity", "-Infinity", "1e", "0x10", "\uff11"]
CHAT = "/v1/chat/completions"
INTEGERS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (CHAT, "n"),
    (CHAT, "seed"),
    (CHAT, "top_k"),
    (CHAT, "min_tokens"),
    (CHAT, "top_logprobs"),
    ("/v1/completions", "max_tokens"),
    ("/v1/completions", "logprobs"),
    ("/v1/completions", "seed"),
    ("/v1/embeddings", "dimensions"),
    ("/v1/images/generations", "n"),
    ("/v1/images/generations", "seed"),
    ("/v1/images/generations", "steps"),
    ("/v1/audio/speech", "seed"),
]
FLOATS = [
    (CHAT, "temperature"),
    (CHAT, "top_p"),
    (CHAT, "presence_penalty"),
    (CHAT, "repetition_penalty"),
    ("/v1/images/generations", "guidance_scale"),
    ("/v1/audio/speech", "speed"),
]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/images/generations": {"prompt": "a"},
    "/v1/audio/speech": {"input": "a", "voice": "ada"},
}


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world(patience=0.2) as made:
        made.tokenizer.reply = lambda request: words("Hello")
        yield made


def body(path: str, field: str, number: str) -> bytes:
    """A request whose `field` is written as `number`, which json cannot write."""
    fields = {"model": "m", **BASES[path], field: "@"}
    return json.dumps(fields).replace('"@"', number).encode()


async def refused(here: World, path: str, data: bytes) -> dict[str, Any]:
    """The error of a 400."""
    http = await Http(here.app, path, data).done()
    assert http.status == 400, http.body
    error: dict[str, Any] = http.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("path", "field"), INTEGERS)
async def test_integers_beyond_a_word_are_refused_by_name(
    here: World, path: str, field: str
) -> None:
    for number in HUGE:
        if number == str(2**63) and field not in ("n", "top_logprobs", "logprobs", "steps"):
            continue
        error = await refused(here, path, body(path, field, number))
        assert error["param"] == field, (number, error)


@pytest.mark.parametrize(("path", "field"), FLOATS)
async def test_floats_out_of_their_range_are_refused_by_name(
    here: World, path: str, field: str
) -> None:
    for number in ("1e30", "1e400", "-1e30", "1" + "0" * 30, "1" + "0" * 400):
        error = await refused(here, path, body(path, field, number))
        assert error["param"] == field, (number, error)


@pytest.mark.parametrize(("path", "field"), INTEGERS[:1] + FLOATS[:1])
async def test_what_json_has_no_number_for_is_refused(here: World, path: str, field: str) -> None:
    for number in NO_JSON:
        await refused(here, path, body(path, field, number))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"1" + "0" * 30: 1}}, "logit_bias"),
        ({"logit_bias": {"1": "@"}}, "logit_bias"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"maximum": "@"}}}
                ]
            },
            "tools",
        ),
        ({"tool_choice": {"type": "@"}}, "tool_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"a": "@"}},
                }
            },
            "response",
        ),
        ({"reasoning_effort": {"a": ["@"]}}, "reasoning_effort"),
        ({"stop": ["@"]}, "stop"),
        ({"messages": [{"role": "user", "content": "@"}]}, "messages"),
        ({"stream_options": {"include_usage": "@"}}, "stream_options"),
    ],
)
async def test_integers_within_other_fields_are_refused_by_name(
    here: World, fields: Any, param: str
) -> None:
    for number in ("1" + "0" * 30, "-1" + "0" * 30, "1" + "0" * 400):
        data = (
            json.dumps({"model": "m", "messages": HELLO} | fields).replace('"@"', number).encode()
        )
        error = await refused(here, CHAT, data)
        assert error["param"].startswith(param), error


async def test_token_ids_beyond_a_word_are_refused(here: World) -> None:
    for prompt in ([10**30], [1, 10**30], [[10**30]]):
        error = await refused(
            here, "/v1/completions", json.dumps({"model": "m", "prompt": prompt}).encode()
        )
        assert error["param"].startswith("prompt")


@pytest.mark.parametrize("number", ["1" + "0" * 30, "1e30", "1e400"])
@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.create", "response": {"max_output_tokens": "@"}},
        {"type": "response.create", "response": {"temperature": "@"}},
        {"type": "response.create", "response": {"metadata": {"a": "@"}}},
        {"type": "session.update", "session": {"type": "realtime", "max_output_tokens": "@"}},
        {"type": "session.update", "session": {"type": "realtime", "tool_choice": {"a": "@"}}},
        {
            "type": "conversation.item.truncate",
            "item_id": "i",
            "content_index": "@",
            "audio_end_ms": 1,
        },
        {
            "type": "conversation.item.truncate",
            "item_id": "i",
            "content_index": 0,
            "audio_end_ms": "@",
        },
    ],
    ids=lambda event: event["type"],
)
async def test_realtime_events_are_refused_and_the_session_lives(
    here: World, event: Any, number: str
) -> None:
    async with session(here.app) as socket:
        socket.send_raw(json.dumps(event).replace('"@"', number))
        error = await socket.receive()
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"


def test_the_largest_numbers_pass() -> None:
    given = ChatBody(model="m", messages=[], max_tokens=2**63 - 1, seed=-(2**63))
    assert chat_requests(given, "r")[0].max_tokens == 2**63 - 1
