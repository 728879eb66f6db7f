"""Three models where one fits at a time: loaded when a request needs them, left when streams end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e import markov
from e2e.stack import ENDLESS, WAIT_SECONDS, MotetStack, fetch, until
from support.checkpoints.language_checkpoints import tiny_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

NAMES = ("first", "second")
CONFIG = """
[settings]
asr = "none"
tts = "none"
vad = 0

[on_demand]
max_loaded = 1
keep_alive = "forever"

[roles.decode]
settings = {{ num_blocks = 64 }}

[models.first]
source = "{first}"
load = "on demand"

[models.second]
source = "{second}"
load = "on demand"
keep_alive = "2s"
settings = {{ num_blocks = 32 }}

[models.endless]
source = "{endless}"
load = "on demand"

[models.broken]
source = "{broken}"
load = "on demand"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """A stack that holds one of its models at a time."""
    folder = tmp_path_factory.mktemp("on_demand")
    paths = {name: tiny_checkpoint("llama", folder / name, seed=i) for i, name in enumerate(NAMES)}
    paths["endless"] = markov.save(folder / ENDLESS)
    paths["broken"] = tiny_checkpoint("llama", folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(b"\0" * 64)
    (folder / "motet.toml").write_text(CONFIG.format(**paths))
    with MotetStack(folder, "--config", str(folder / "motet.toml")) as stack:
        yield stack


def chat(stack: MotetStack, model: str, tokens: int = 4, **headers: str) -> httpx.Response:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(
        f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT_SECONDS
    )


def lines(stack: MotetStack, model: str, tokens: int) -> Iterator[str]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    with httpx.stream(
        "POST", f"{stack.url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS
    ) as reply:
        assert reply.status_code == 200, reply.read()
        yield from (line for line in reply.iter_lines() if line)


def listed(stack: MotetStack) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in fetch(f"{stack.url}/v1/models").json()["data"]}


def resident(stack: MotetStack) -> list[str]:
    return [child["model"] for child in stack.children("decode")]


def test_nothing_is_loaded_before_it_is_needed(small: MotetStack) -> None:
    assert small.ready()
    assert resident(small) == []
    models = until(lambda: len(found := listed(small)) == 4 and found, "all models are listed")
    assert models
    for name in (*NAMES, "endless"):
        assert models[name]["status"] == "unloaded"
        assert models[name]["loading"]["stage"] == "absent"
        assert "chat" in models[name]["capabilities"]


def test_a_request_that_will_not_wait_is_told_when_to_come_again(small: MotetStack) -> None:
    reply = chat(small, "first", prefer="wait=0")
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "model_loading"
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    until(lambda: listed(small)["first"]["status"] == "ready", "the model that was asked for")
    assert chat(small, "first", prefer="wait=0").status_code == 200
    assert resident(small) == ["first"]


def test_streams_end_before_their_model_leaves(small: MotetStack) -> None:
    """Another model is asked for while one streams: it waits, with notice, until that has ended."""
    tokens = 400
    stream = lines(small, "endless", tokens)
    comments = []
    for line in stream:
        if line.startswith("data:"):
            break
        comments.append(line)
    assert comments  # "first" left, "endless" was loaded
    stages = [json.loads(line.removeprefix(": loading "))["stage"] for line in comments]
    assert {"clearing", "loading"} & {*stages}  # a small model is loaded between two comments
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(chat, small, name) for name in NAMES]
        seen = set()
        events = []
        for line in stream:
            events.append(line)
            seen.add(tuple(resident(small)) if len(events) % 50 == 0 else ("endless",))
        replies = [one.result() for one in asked]
    assert events[-1] == "data: [DONE]"
    usage = json.loads(events[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens"] == tokens
    assert seen == {("endless",)}
    assert [reply.status_code for reply in replies] == [200, 200]
    assert all(reply.json()["usage"]["completion_tokens"] == 4 for reply in replies)
    assert len(resident(small)) == 1


def test_many_requests_for_all_models_fail_nowhere(small: MotetStack) -> None:
    wanted = ["first", "second", "first", "endless", "second", "first"]
    with ThreadPoolExecutor(len(wanted)) as threads:
        replies = list(threads.map(lambda name: chat(small, name, 8), wanted))
    assert [reply.status_code for reply in replies] == [200] * len(wanted)
    assert [reply.json()["model"] for reply in replies] == wanted
    alone = {name: chat(small, name, 8).json()["choices"][0]["message"] for name in NAMES}
    for name, reply in zip(wanted, replies, strict=True):
        if name in alone:
            assert reply.json()["choices"][0]["message"] == alone[name]


def test_a_model_leaves_after_its_keep_alive(small: MotetStack) -> None:
    assert chat(small, "second").status_code == 200
    began = time.monotonic()
    until(lambda: resident(small) == [], "the model has left")
    assert time.monotonic() - began > 1.0
    assert listed(small)["second"]["status"] == "unloaded"


def test_a_model_that_cannot_be_loaded_is_an_error_and_others_are_served(small: MotetStack) -> None:
    reply = chat(small, "broken")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (503, "model_load_failed", "model")
    assert listed(small)["broken"]["status"] == "failed"
    assert chat(small, "first").status_code == 200
