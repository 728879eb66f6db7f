"""/api/…: what becomes of each parameter, lines of a stream, how long models stay, and refusals."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_gateway.ollama import pull
from motet_gateway.ollama.duration import FOREVER, seconds_of
from motet_gateway.ollama.options import MAX_STOPS
from motet_shared.errors import BadRequest
from motet_shared.messages import Chat, Complete, Offer
from motet_shared.tenants import digest
from motet_shared.testing import memory_buses, settle
from motet_shared.wire.bus import Bus, keep_key
from support.clients.gateway_client import HELLO, Http, World, world
from support.services.fake_services import MODEL

TENANTS = """
[tenants.plain]
[tenants.operator]
metrics = true
[[keys]]
tenant = "plain"
sha256 = "{plain}"
created = 2026-11-22
[[keys]]
tenant = "operator"
sha256 = "{operator}"
created = 2026-11-22
"""
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def lines(http: Http) -> list[Any]:
    return [json.loads(line) for line in http.body.splitlines()]


async def asked(here: World, path: str = "/api/chat", **fields: Any) -> Any:
    """Return the request that the tokenizer gets."""
    base: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": "hello"}
    reply = await here.ask(path, **base | fields).done()
    assert reply.status == 200, reply.json()
    return here.tokenizer.requests[-1]


async def refused(here: World, path: str = "/api/chat", **fields: Any) -> tuple[int, str | None]:
    base: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": "hello"}
    reply = await here.ask(path, **base | fields).done()
    body = reply.json()
    assert body.keys() == {"error", "code", "param"}
    return reply.status, body["param"]


async def test_options_become_sampling() -> None:
    options: dict[str, Any] = {
        "num_predict": 5,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.1,
    }
    options |= {"seed": 7, "stop": ["x"] * MAX_STOPS, "repeat_penalty": 1.5, "repeat_last_n": -1}
    options |= {"presence_penalty": 1, "frequency_penalty": -1, "mirostat": 0, "tfs_z": 1.0}
    async with world() as here:
        request = await asked(here, options=options)
        sampling = request.sampling
        assert (request.max_tokens, request.stop) == (5, ["x"] * MAX_STOPS)
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.5)
        assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 7, 1.5)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
        unlimited = await asked(here, options={"num_predict": -1, "seed": -1})
        assert unlimited.max_tokens is None
        assert unlimited.sampling.seed >= 0
        raw = await asked(here, "/api/generate", raw=True, options={"repeat_last_n": 0})
        assert isinstance(raw, Complete)
        assert (raw.max_tokens, raw.sampling.repetition_penalty) == (None, 1.0)


async def test_results_of_tools_find_their_calls() -> None:
    """By id, by the tool's name, or in the calls' order; each call has one result."""
    calls: list[dict[str, Any]] = [{"function": {"name": name, "arguments": {}}} for name in "fgfg"]
    calls[3]["id"] = "mine"
    results: list[dict[str, Any]] = [{"tool_name": "g"}, {"tool_call_id": "mine"}, {}, {}]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    messages += [{"role": "tool", "content": str(n)} | one for n, one in enumerate(results)]
    async with world() as here:
        made = (await asked(here, messages=messages)).messages
        ids = [call["id"] for call in made[1]["tool_calls"]]
        assert [one["tool_call_id"] for one in made[2:]] == [ids[1], "mine", ids[0], ids[2]]
        more: tuple[tuple[str, str], ...] = (("tool_name", "g"), ("tool_call_id", "mine"))
        for name, value in more:
            extra = {"role": "tool", "content": "5", name: value}
            assert await refused(here, messages=[*messages, extra]) == (400, f"messages[6].{name}")


async def test_parameters_of_loading_are_ignored_by_name() -> None:
    async with world() as here:
        reply = await here.ask(
            "/api/chat", messages=HELLO, options={"num_ctx": 99, "num_gpu": 1}, truncate=True
        ).done()
        named = set(reply.headers["motet-ignored"].split(", "))
        assert named == {"options.num_ctx", "options.num_gpu", "truncate"}


async def test_a_generation_is_a_chat_unless_it_is_raw() -> None:
    async with world() as here:
        chat = await asked(here, "/api/generate", system="s", images=["AAAA"], format=SCHEMA)
        assert isinstance(chat, Chat)
        system, user = chat.messages
        assert system == {"role": "system", "content": "s"}
        assert user["content"] == [{"type": "image"}, {"type": "text", "text": "hello"}]
        assert chat.grammar is not None
        assert json.loads(chat.grammar.text) == SCHEMA
        filled = await asked(here, "/api/generate", suffix="end", format="json")
        assert isinstance(filled, Complete)
        assert (filled.prompt, filled.suffix) == ("hello", "end")
        assert filled.grammar is not None
        await here.service.close()  # the store of the picture


async def test_a_stream_is_lines_that_end_with_the_counts() -> None:
    async with world() as here:
        reply = await here.ask("/api/chat", messages=HELLO).done()
        assert reply.headers["content-type"] == "application/x-ndjson"
        *parts, last = lines(reply)
        assert "".join(part["message"]["content"] for part in parts) == "You said: hello"
        assert not any(part["done"] for part in parts)
        assert (last["done"], last["done_reason"]) == (True, "stop")
        assert (last["prompt_eval_count"], last["eval_count"]) == (7, 3)
        assert last["prompt_eval_duration"] == 2_000_000
        assert last["total_duration"] > 0
        whole = (await here.ask("/api/generate", prompt="hello", stream=False).done()).json()
        assert whole["response"] == "You said: hello"
        assert whole.keys() - {"response"} == last.keys() - {"message"}


async def test_a_reply_that_breaks_ends_with_its_error() -> None:
    async with world() as here:
        here.tokenizer.error, here.tokenizer.fail_after = BadRequest("broken", param="messages"), 1
        *_, last = lines(await here.ask("/api/chat", messages=HELLO).done())
        assert (last["error"], last["code"]) == ("broken", "invalid_request")
        assert await refused(here, stream=False) == (400, "messages")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat", {"model": "none"}, "model"),
        ("chat", {"think": True}, "think"),
        ("chat", {"think": "max"}, "think"),
        ("chat", {"format": "xml"}, "format"),
        ("chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        ("chat", {"options": {"temperature": 3}}, "options.temperature"),
        ("chat", {"options": {"stop": [""]}}, "options.stop"),
        ("chat", {"options": {"unknown": 1}}, "options.unknown"),
        (
            "chat",
            {"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}},
            "options.repeat_last_n",
        ),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"keep_alive": "soon"}, "keep_alive"),
        (
            "chat",
            {"messages": [{"role": "system", "content": "", "images": ["AAAA"]}]},
            "messages[0].images",
        ),
        (
            "chat",
            {"messages": [*HELLO, {"role": "user", "content": "", "images": ["?"]}]},
            "messages[1].images[0]",
        ),
        (
            "chat",
            {"messages": [{"role": "tool", "content": "", "tool_name": "f"}]},
            "messages[0].tool_name",
        ),
        ("generate", {"template": "{{ .Prompt }}"}, "template"),
        ("generate", {"context": [1]}, "context"),
        ("generate", {"raw": True, "system": "s"}, "system"),
        ("generate", {"suffix": "s", "images": ["AAAA"]}, "images"),
        ("generate", {"images": ["?"]}, "images[0]"),
    ],
)
async def test_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    async with world() as here:
        status = 404 if param == "model" else 400
        assert await refused(here, f"/api/{path}", **fields) == (status, param)


@pytest.mark.parametrize("name", ["create", "copy", "push", "blobs/sha256:0"])
async def test_a_library_of_models_is_not_changed(name: str) -> None:
    async with world() as here:
        reply = await here.ask(f"/api/{name}").done()
        assert (reply.status, reply.json()["code"]) == (400, "unsupported_operation")


# ------------------------------------------------------------------------------------- keep_alive
@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (5, 5.0),
        ("5", 5.0),
        ("1h30m", 5400.0),
        ("1.5s250ms", 1.75),
        ("0", 0.0),
        (-1, FOREVER),
        ("-1m", FOREVER),
    ],
)
def test_durations(given: float | str, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 m", "1d", "1" * 99, math.inf, "5m5"])
def test_what_is_no_duration(given: float | str) -> None:
    with pytest.raises(BadRequest) as caught:
        seconds_of(given)
    assert caught.value.param == "keep_alive"


@asynccontextmanager
async def tenants(folder: Path, *offers: Offer) -> AsyncIterator[tuple[World, Bus]]:
    """Run a gateway with two tenants, and a supervisor that offers these models."""
    file = folder / "tenants.toml"
    file.write_text(TENANTS.format(plain=digest("plain"), operator=digest("operator")))
    async with world(tenants_file=file) as here, memory_buses("operator", hub=here.hub) as (bus,):
        bus.offers = lambda: list(offers)
        bus.set_state("ready")
        await settle()
        yield here, bus


def kept(supervisor: Bus) -> list[float]:
    key = keep_key("decode", MODEL)
    beats = supervisor.directory.instances("gateway")
    return [beat.load[key] for beat in beats if key in beat.load]


async def test_an_operator_decides_how_long_a_model_stays(tmp_path: Path) -> None:
    offer = Offer(role="decode", model=MODEL, stage="ready", share=1.0, stay=60.0)
    async with tenants(tmp_path, offer) as (here, supervisor):
        operator = {"authorization": "Bearer operator"}
        ask: Any = {"path": "/api/chat", "messages": HELLO, "keep_alive": "5m"}
        assert (await here.ask(headers=operator, **ask).done()).status == 200
        await settle()
        assert kept(supervisor) == [300.0]
        (running,) = (await here.get("/api/ps", operator).done()).json()["models"]
        assert running["expires_at"].startswith("20")
        gone = await here.ask("/api/generate", headers=operator, keep_alive=0).done()
        assert gone.json()["done_reason"] == "unload"
        await settle()
        assert kept(supervisor) == [0.0]


async def test_others_do_not(tmp_path: Path) -> None:
    offer = Offer(role="decode", model=MODEL, stage="ready", share=1.0)
    async with tenants(tmp_path, offer) as (here, supervisor):
        plain = {"authorization": "Bearer plain"}
        reply = await here.ask("/api/chat", headers=plain, messages=HELLO, keep_alive=-1).done()
        assert (reply.status, reply.headers["motet-ignored"]) == (200, "keep_alive")
        refusal = await here.ask("/api/generate", headers=plain, keep_alive=0).done()
        assert (refusal.status, refusal.json()["param"]) == (403, "keep_alive")
        pulled = await here.ask("/api/pull", headers=plain).done()
        assert pulled.status == 403
        await settle()
        assert kept(supervisor) == []


async def test_a_model_that_is_always_loaded_is_not_unloaded() -> None:
    async with world() as here:
        assert await refused(here, "/api/generate", prompt="", keep_alive=0) == (400, "keep_alive")
        loaded = (await here.ask("/api/chat").done()).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")


# ------------------------------------------------------------------------------------------- pull
def downloading(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have `program` run in place of `motet`; its arguments are in `sys.argv[1:]`."""
    monkeypatch.setattr(pull, "COMMAND", (sys.executable, "-S", "-c", program))


async def test_a_download_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_API_KEY", "sesame")
    program = """
import json, os, sys
assert not [name for name in os.environ if name.startswith("MOTET_")]
for line in ({"status": sys.argv[1:]}, {"status": "success"}):
    print(json.dumps(line), flush=True)
"""
    downloading(monkeypatch, program)
    async with world() as here:
        reply = await here.ask("/api/pull", model="org/name").done()
        assert lines(reply) == [
            {"status": ["pull", "--json", "--", "org/name"]},
            {"status": "success"},
        ]
        whole = await here.ask("/api/pull", model="org/name", stream=False).done()
        assert whole.json() == {"status": "success"}
        assert here.service.downloads == 0


async def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    downloading(monkeypatch, """print('{"error": "no such repository"}'); raise SystemExit(1)""")
    async with world() as here:
        reply = await here.ask("/api/pull", model="org/name").done()
        assert (reply.status, reply.json()["code"]) == (400, "pull_failed")
        assert "no such repository" in reply.json()["error"]


async def test_a_download_ends_with_its_client_and_only_some_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    downloading(monkeypatch, """print("{}", flush=True); import time; time.sleep(60)""")
    async with world() as here:
        running = [here.ask("/api/pull", model="org/name") for _ in range(pull.MAX_PULLS)]
        while not all(http.chunks for http in running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        refusal = await here.ask("/api/pull", model="org/name").done()
        assert refusal.status == 429
        for http in running:
            http.leave()
            await http.done()
        assert here.service.downloads == 0


@pytest.mark.parametrize("name", ["", "name", "-x/y", "../x/y", "org/name; x", "/etc/passwd"])
async def test_only_names_on_the_hub_are_downloaded(name: str) -> None:
    async with world() as here:
        reply = await here.ask("/api/pull", model=name).done()
        assert (reply.status, reply.json()["param"]) == (400, "model")
