"""A stack whose language model is another server: `motet up --engine openai --engine-url …`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.stack import MotetStack
from motet_shared.process.actor import EXIT_CONFIG
from support.media.picture_files import encoded, pattern

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

QUESTION = "There is a red circle, a blue square and a green star. What do you see?"
TEXT_ONLY = ("--asr", "none", "--tts", "none", "--vad", "0")


@pytest.fixture(scope="module")
def front(stack: MotetStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """A stack with two hosts in front of the gateway of another stack; it holds no weights."""
    engine = ("--engine", "openai", "--engine-url", f"{stack.url}/v1", "--decode", "2")
    folder = tmp_path_factory.mktemp("front")
    with MotetStack(folder, "--llm", "pocket-chat", *engine, *TEXT_ONLY) as front:
        front.wait_until_all_ready()
        yield front


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": "pocket-chat", "messages": messages, "temperature": 0, **fields}


def ask(server: MotetStack, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/chat/completions", json=body(**fields), trust_env=False, timeout=60
    )


def test_replies_are_those_of_the_engine(stack: MotetStack, front: MotetStack) -> None:
    theirs, ours = ask(stack).json(), ask(front).json()
    assert ours["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
    assert ours["choices"][0]["finish_reason"] == "stop"
    for name in ("prompt_tokens", "completion_tokens"):
        assert ours["usage"][name] == theirs["usage"][name]


def test_a_schema_holds_at_the_engine(front: MotetStack) -> None:
    schema = {
        "type": "object",
        "properties": {"red": {"type": "boolean"}},
        "required": ["red"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}}
    answer = ask(front, response_format=wanted, max_tokens=40)
    assert answer.status_code == 200, answer.text
    assert set(json.loads(answer.json()["choices"][0]["message"]["content"])) == {"red"}


def test_a_killed_host_does_not_break_a_reply(front: MotetStack) -> None:
    want = ask(front).json()["choices"][0]["message"]["content"]
    front.kill("decode-1")
    assert ask(front).json()["choices"][0]["message"]["content"] == want


def test_pictures_are_seen_by_the_engine(stack: MotetStack, front: MotetStack) -> None:
    """The host has no encoder beside it; the server behind it sees the picture."""
    url = "data:image/png;base64," + base64.b64encode(encoded(pattern(32, 32))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What do you see?"},
    ]
    messages = [{"role": "user", "content": content}]
    theirs, ours = (ask(server, messages=messages).json() for server in (stack, front))
    assert ours["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
    assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
    broken = {"url": "data:image/png;base64,AAAA"}
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": broken}]}]
    error = ask(front, messages=messages).json()["error"]
    assert error["param"] == "messages[0].content[0].image_url"
    cards = httpx.get(f"{front.url}/v1/models", trust_env=False, timeout=60).json()["data"]
    card = next(one for one in cards if one["id"] == "pocket-chat")
    assert "vision" in card["capabilities"]
    ready = httpx.get(f"{front.url}/health/ready", trust_env=False, timeout=60).json()
    assert ready["images"] == {"missing": [], "models": []}


def test_the_engine_that_served_is_named(front: MotetStack) -> None:
    assert ask(front).headers["motet-served-by"] == "openai"
    pinned = {"motet-target": "nowhere"}
    answer = httpx.post(
        f"{front.url}/v1/chat/completions",
        json=body(),
        headers=pinned,
        trust_env=False,
        timeout=60,
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "motet-target")


def test_a_wrong_setting_of_the_only_model_ends_the_stack(
    stack: MotetStack, tmp_path: Path
) -> None:
    """Its host refuses to start, which another start would not change."""
    engine = ("--engine", "openai", "--engine-url", f"{stack.url}/v1", "--engine-model", "nothing")
    wrong = MotetStack(tmp_path, "--llm", "pocket-chat", *engine, *TEXT_ONLY)
    wrong.start()
    try:
        assert wrong.process.wait(120) == EXIT_CONFIG
    finally:
        wrong.stop()
    assert wrong.log().count("engine_model='nothing'") == 2  # as the host says it, and at its end
    assert not wrong.leftovers()
