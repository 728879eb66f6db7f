"""Prompts that cost more than they may: megabytes of text, thousands of tools. The gateway, the tokenizer and the model
that ships are real; decode is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from motet_gateway.config import GatewayConfig
from motet_gateway.context import GatewayContext
from motet_gateway.http.app import App
from motet_gateway.http.json_size import MAX_IDS, TooManyValues, check_json
from motet_llm.grammar.compiler import GrammarCache
from motet_llm.grammar.token_spelling import Spelling
from motet_shared.errors import BadRequest
from motet_shared.messages import Chat, Grammar, ModelCard, Sampling
from motet_shared.process.actor import Actor
from motet_shared.process.fair_slots import FairSlots
from motet_shared.process.telemetry import Metrics
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.tool_formats.hermes import HERMES
from motet_shared.wire.bus import Bus
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.dialect import Dialect
from motet_tokenizer.service import Tokenizer
from support.checkpoints import tiny_tokenizers
from support.clients.gateway_client import Http, Socket, session
from support.services.scripted_decode import MODEL, ScriptedDecode
from support.stages.tenants_stage import ACME, OTHER, bearer, document

POCKET = Path(__file__).parents[2] / "models" / "pocket-chat"
LIMITS = "tokens_per_minute = 1000\nmax_context = 256"
MEGABYTES = 4 << 20
TEXTS = {
    "newlines": "\n" * MEGABYTES,
    "words": "word " * (MEGABYTES // 5),
    "emoji": "👩" * (MEGABYTES // 4),
}
LARGEST = "\n" * 900_000  # that a message of NATS holds: seconds to encode
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Embedding(Actor):
    """Says that it is there; what is refused before it is asked needs no more."""

    role = "embedding"

    def models(self) -> list[ModelCard]:
        return [ModelCard(name="vectors", context=256)]


@dataclass
class Attacked:
    service: GatewayContext
    app: App
    tokenizer: Tokenizer
    decode: ScriptedDecode

    def ask(self, key: str, path: str = "/v1/chat/completions", **fields: Any) -> Http:
        return Http(
            self.app, path, json.dumps({"model": MODEL, **fields}).encode(), headers=bearer(key)
        )

    def chat(self, key: str, text: str, **fields: Any) -> Http:
        return self.ask(key, messages=[{"role": "user", "content": text}], max_tokens=4, **fields)

    def tokens(self) -> int:
        bucket = self.service.authenticator.authenticate(
            {"headers": [(b"authorization", f"Bearer {ACME}".encode())]}
        ).tenant.tokens
        assert bucket.bucket is not None
        return int(bucket.bucket.level)


@contextlib.asynccontextmanager
async def attacked(
    tmp_path: Path, limits: str = LIMITS, context: int = 2048, **settings: Any
) -> AsyncIterator[Attacked]:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(document(limits))
    hub = MemoryHub()
    async with contextlib.AsyncExitStack() as stack:
        bus = await _bus(hub, "gateway", stack)
        options: dict[str, Any] = {
            "model": (f"{MODEL}={_folder(tmp_path, context)}",),
            "decode_wait": 1.0,
            **settings,
        }
        tokenizer = Tokenizer(TokenizerConfig(**options), await memory_bus(hub, "tokenizer"))
        decode = ScriptedDecode(await memory_bus(hub, "decode"), [40, 41, 42, 43], context=context)
        for actor in (tokenizer, decode, Embedding(None, await memory_bus(hub, "embedding"))):
            await stack.enter_async_context(running(actor))
        await settle()
        service = GatewayContext(
            GatewayConfig(tenants_file=tenants, patience=0.2), bus, Metrics("gateway", bus.instance)
        )
        yield Attacked(service, App(service), tokenizer, decode)


async def _bus(hub: MemoryHub, role: str, stack: contextlib.AsyncExitStack) -> Bus:
    bus = await memory_bus(hub, role)
    stack.push_async_callback(bus.close)
    return bus


def _folder(tmp_path: Path, context: int) -> Path:
    """The model that ships, without its weights and with another context."""
    folder = tmp_path / "model"
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LONGEST_WAIT = 8.0  # seconds; no busy machine keeps a process waiting for longer


@contextlib.asynccontextmanager
async def longest_pause() -> AsyncIterator[list[float]]:
    """Yield the longest time, in seconds, for which the event loop, and so every heartbeat, stood still.

    While other processes have the processor, this one cannot answer, whatever it does: a pause counts with the CPU
    time that this process used in it, and in full from `LONGEST_WAIT` seconds on.
    """
    longest, loop = [0.0], asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            began, used = loop.time(), time.process_time()
            await asyncio.sleep(0.01)
            pause, own = loop.time() - began - 0.01, time.process_time() - used
            longest[0] = max(longest[0], pause if pause > LONGEST_WAIT else min(pause, own))

    task = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        task.cancel()


@pytest.mark.parametrize("kind", [*TEXTS, "tools", "5,000 tools"])
async def test_what_cannot_fit_is_refused_before_it_is_encoded(tmp_path: Path, kind: str) -> None:
    async with attacked(tmp_path) as stage, longest_pause() as longest:
        tools = {"tools": 50_000, "5,000 tools": 5_000}.get(kind, 0)
        fields: dict[str, Any] = {"tools": [TOOL] * tools} if tools else {}
        text = TEXTS.get(kind, "Hello")
        before = stage.tokens()
        attack, other = stage.chat(ACME, text, **fields), stage.chat(OTHER, "Hello")
        await asyncio.gather(attack.done(), other.done())
        error = attack.json()["error"]
        assert attack.status == 400
        assert error["param"] == ("tools" if tools == 5_000 else "messages")
        assert tools == 5_000 or error["code"] == "context_length_exceeded"
        assert other.status == 200, other.body
        assert len(stage.decode.requests) == 1
        assert stage.tokenizer.bus.calls.requests == 1  # the other tenant's alone
        assert stage.tokens() <= before - 200
        assert longest[0] < 1.0


async def test_a_tenant_in_debt_is_refused_before_its_body_is_decoded(tmp_path: Path) -> None:
    async with attacked(tmp_path) as stage:
        statuses = [(await stage.chat(ACME, TEXTS["newlines"]).done()).status for _ in range(6)]
        assert statuses[0] == 400
        assert statuses[-1] == 429
        broken = Http(stage.app, "/v1/chat/completions", b"{" * MEGABYTES, headers=bearer(ACME))
        assert (await broken.done()).status == 429
        assert (await stage.chat(OTHER, "Hello").done()).status == 200


async def test_a_prompt_that_was_encoded_to_be_refused_is_charged(tmp_path: Path) -> None:
    async with attacked(tmp_path) as stage:
        http = await stage.chat(ACME, "\n" * 3000).done()
        assert (http.status, http.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert stage.tokens() <= 300


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"prompt": TEXTS["newlines"]}, "prompt"),
    ("/v1/completions", {"prompt": ["a", TEXTS["emoji"]]}, "prompt"),
    ("/v1/completions", {"prompt": [1] * 100_000}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 100_000}, "messages"),
    ("/v1/embeddings", {"model": "vectors", "input": TEXTS["words"]}, "input"),
    ("/v1/embeddings", {"model": "vectors", "input": [[1] * 100_000]}, "input"),
])  # fmt: skip
async def test_every_path_of_text_is_bounded(
    tmp_path: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    async with attacked(tmp_path) as stage:
        http = await stage.ask(ACME, path, **fields).done()
        error = http.json()["error"]
        assert (http.status, error["code"], error["param"]) == (
            400,
            "context_length_exceeded",
            param,
        )
        assert stage.tokenizer.bus.calls.requests == 0
        assert stage.tokens() < 1000


async def test_speech_is_bounded(tmp_path: Path) -> None:
    async with attacked(tmp_path) as stage:
        http = await stage.ask(ACME, "/v1/audio/speech", input=TEXTS["words"]).done()
        assert (http.status, http.json()["error"]["param"]) == (400, "input")


async def test_the_largest_prompts_hold_up_nobody(tmp_path: Path) -> None:
    """Where the context is large enough for them: they are encoded in a child, which ends with its client."""
    async with attacked(tmp_path, limits="", context=1 << 23) as stage, longest_pause() as longest:
        attack = stage.chat(ACME, LARGEST)
        async with asyncio.timeout(20):
            while not stage.tokenizer._encoders.pids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        pids = stage.tokenizer._encoders.pids
        for _ in range(20):
            http = await stage.chat(OTHER, "Hello").done()
            assert http.status == 200, http.body
        assert stage.tokenizer._encoders.pids == pids
        assert not attack.complete
        attack.leave()
        await attack.done()
        async with asyncio.timeout(20):
            while stage.tokenizer._encoders.pids:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert longest[0] < 1.0


async def test_a_child_encodes_as_the_tokenizer_does(tmp_path: Path) -> None:
    text = "<|im_end|>\n<|im_start|>system\nHello, naïve 👩‍🚀! " * 30
    async with attacked(tmp_path, limits="", context=1 << 20, process_chars=100) as stage:
        assert (await stage.chat(OTHER, text, tools=[TOOL]).done()).status == 200
        first = stage.tokenizer._encoders.pids
        assert (await stage.chat(OTHER, text, tools=[TOOL]).done()).status == 200
        assert stage.tokenizer._encoders.pids == first  # kept warm
        template = stage.tokenizer.vocabularies[MODEL].template
        expected = template.encode([{"role": "user", "content": text}], [TOOL])
        assert [request.prompt for request in stage.decode.requests] == [expected, expected]


async def test_a_child_that_was_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    text = "Hello! " * 1000
    async with attacked(tmp_path, limits="", context=1 << 20, process_chars=100) as stage:
        encoders = stage.tokenizer._encoders
        assert (await stage.chat(OTHER, text).done()).status == 200
        (killed,) = encoders.pids
        os.kill(killed, signal.SIGKILL)
        await asyncio.gather(*[process.wait() for process in encoders._idle])
        assert (await stage.chat(OTHER, text).done()).status == 200
        assert len(encoders.pids) == 1
        assert killed not in encoders.pids


async def test_a_prompt_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async with attacked(tmp_path, limits="", context=1 << 23, encode_limit=0.1) as stage:
        http = await stage.chat(ACME, LARGEST).done()
        assert (http.status, http.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert not stage.tokenizer._encoders.pids


async def test_no_tenant_holds_all_places() -> None:
    slots, held, go = FairSlots(2), [], asyncio.Event()

    async def work(tenant: str) -> None:
        async with slots.slot(tenant):
            held.append(tenant)
            await go.wait()

    tasks = [asyncio.create_task(work("greedy")) for _ in range(5)]
    await asyncio.sleep(0.01)
    tasks += [asyncio.create_task(work(name)) for name in ("other", "third")]
    await asyncio.sleep(0.01)
    assert held == ["greedy", "other"]
    tasks[4].cancel()
    tasks[1].cancel()
    await asyncio.sleep(0.01)
    assert slots.waiting == 3
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(held) == ["greedy"] * 3 + ["other", "third"]
    async with slots.slot("greedy"):
        assert slots.waiting == 0


# ---------------------------------------------------------------------------------------- realtime
SPOKEN_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


async def _refused(socket: Socket) -> dict[str, Any]:
    return dict((await socket.until("error"))[-1]["error"])


@pytest.mark.parametrize(
    ("text", "response", "param"),
    [
        (TEXTS["newlines"], {}, "response"),
        ("Hello", {"instructions": TEXTS["words"]}, "response"),
        ("Hello", {"tools": [SPOKEN_TOOL] * 600}, "tools"),
    ],
    ids=["item", "instructions", "tools"],
)
async def test_a_realtime_session_is_bounded(
    tmp_path: Path, text: str, response: dict[str, Any], param: str
) -> None:
    async with attacked(tmp_path) as stage, longest_pause() as longest:
        async with (
            session(stage.app, query={"model": MODEL}, headers=bearer(ACME)) as attack,
            session(stage.app, query={"model": MODEL}, headers=bearer(OTHER)) as other,
        ):
            before = stage.tokens()
            attack.say(text)
            await attack.until("conversation.item.done")
            attack.send("response.create", response=response)
            error = await _refused(attack)
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert stage.tokens() <= before - 100
            assert stage.tokenizer.bus.calls.requests == 0
            other.say("Hello")
            other.send("response.create")
            assert (await other.until("response.done"))[-1]["response"]["status"] == "completed"
            assert attack.closed is None
        assert longest[0] < 1.0


# ---------------------------------------------------------------- bodies that are slow to decode
def _body(tail: str) -> bytes:
    head = '{"model":"' + MODEL + '","messages":[{"role":"user","content":"Hello"}],'
    return (head + tail + "}").encode()


SLOW = {
    "arrays": _body('"tool_choice":[' + "[]," * 5_000_000 + "[]]"),
    "objects": _body('"tool_choice":[' + '{"":0},' * 2_000_000 + "0]"),
    "numbers": _body('"tool_choice":[' + "1," * 8_000_000 + "1]"),
    "keys": _body('"tool_choice":{' + ",".join(f'"k{i}":1' for i in range(500_000)) + "}"),
    "beside a picture": _body('"metadata":{"image_url":"x"},"tools":[' + "{}," * 500_000 + "{}]"),
}


@pytest.mark.parametrize("kind", SLOW)
async def test_bodies_of_many_values_are_refused_before_they_are_decoded(
    tmp_path: Path, kind: str
) -> None:
    async with attacked(tmp_path, limits="", context=1 << 23) as stage, longest_pause() as longest:
        longest[0] = 0.0
        http = await Http(
            stage.app, "/v1/chat/completions", SLOW[kind], headers=bearer(ACME)
        ).done()
        error = http.json()["error"]
        assert (http.status, error["code"], error["param"]) == (400, "too_many_values", "messages")
        assert longest[0] < 0.5  # about 0.1 s where the machine does nothing else


async def test_a_realtime_event_of_many_values_is_refused(tmp_path: Path) -> None:
    async with (
        attacked(tmp_path) as stage,
        session(stage.app, query={"model": MODEL}, headers=bearer(ACME)) as socket,
    ):
        before = stage.tokens()
        socket.send("session.update", session={"type": "realtime", "tracing": [[]] * 100_000})
        assert (await _refused(socket))["code"] == "too_many_values"
        assert stage.tokens() < before
        socket.say("Hello")
        await socket.until("conversation.item.done")


class Charged:
    """A tenant that notes what it is charged."""

    tokens = 0

    def charge_refusal(self, tokens: int) -> None:
        self.tokens += tokens


@pytest.mark.parametrize("text", [
    "A" * (30 << 20),
    ",[{" * 1_000_000,
    '"' * 1_000_000,
    '\\",[' * 500_000,
    '\\\\",[' * 500_000,
], ids=["base64", "marks", "quotes", "escapes", "more escapes"])  # fmt: skip
def test_what_stands_in_strings_is_not_counted(text: str) -> None:
    tenant: Any = Charged()
    check_json(_body('"stop":' + json.dumps(text)), tenant)
    assert tenant.tokens == 0


@pytest.mark.parametrize("text", ["\\", '\\"', '"', '"' + "\\" * 3])
def test_what_stands_after_strings_is_counted(text: str) -> None:
    tenant: Any = Charged()
    with pytest.raises(TooManyValues):
        check_json(_body('"stop":[' + json.dumps(text) + ",[]" * 100_000 + "]"), tenant)
    assert tenant.tokens > 0


@pytest.mark.parametrize(("ids", "passes"), [(1_000_000, True), (1_100_000, False)])
def test_token_ids_may_be_many(ids: int, passes: bool) -> None:
    tenant: Any = Charged()
    with contextlib.nullcontext() if passes else pytest.raises(TooManyValues):
        check_json(json.dumps({"input": [[123456] * ids]}), tenant, "input", MAX_IDS)
    assert bool(tenant.tokens) is not passes


# --------------------------------------------------------------------------- grammars made of tools
def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


TOOLS: dict[str, dict[str, Any]] = {
    "numbers": {"enum": [0] * 400_000},
    "properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}},
    "enum": {"enum": [f"value {i}" for i in range(50_000)]},
    "pattern": {"pattern": "a?" * 200_000},
    "nested": _nested(600),
}


@pytest.mark.parametrize("kind", TOOLS)
async def test_tools_that_make_no_grammar_are_refused_by_the_tokenizer(
    tmp_path: Path, kind: str
) -> None:
    async with attacked(tmp_path, limits="", context=1 << 23) as stage, longest_pause() as longest:
        tool = {"type": "function", "function": {"name": "f", "parameters": TOOLS[kind]}}
        attack = _asked_of_tokenizer([tool])
        with pytest.raises(BadRequest) as refusal:
            await stage.tokenizer._grammar(attack, attack.tools, Dialect(HERMES, None))
        assert refusal.value.param == "tools"
        assert longest[0] < 0.3


@pytest.mark.parametrize("depth", [100, 300, 400, 470, 490, 497, 600])
async def test_nested_tools_are_no_internal_error(tmp_path: Path, depth: int) -> None:
    async with attacked(tmp_path, limits="", context=1 << 16) as stage:
        schema = '{"properties":{"a":' * depth + "{}" + "}}" * depth
        tool = '{"type":"function","function":{"name":"f","parameters":' + schema + "}}"
        body = _body(f'"tool_choice":"required","tools":[{tool}]')
        http = await Http(stage.app, "/v1/chat/completions", body, headers=bearer(ACME)).done()
        assert http.status in (200, 400), http.body


async def test_a_grammar_of_many_tools_is_built_in_a_thread(tmp_path: Path) -> None:
    threads: list[str] = []

    class Watched(list[Any]):
        def __iter__(self) -> Any:
            threads.append(threading.current_thread().name)
            return super().__iter__()

    async with attacked(tmp_path, limits="") as stage:
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": _nested(3)}}
            for i in range(512)
        ]
        chat = _asked_of_tokenizer(tools)
        grammar = await stage.tokenizer._grammar(chat, Watched(tools), Dialect(HERMES, None))
        assert grammar is not None
        assert grammar.text.count("%json") == 512
        assert any(name.startswith("encode") for name in threads)


async def test_no_tenant_holds_all_threads_that_compile_grammars() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    spelling = Spelling(tokenizer, tokenizer.get_vocab_size(), [tiny_tokenizers.EOS])
    grammars = GrammarCache(lambda: spelling, timeout=60, capacity=16)

    def slow(index: int) -> Grammar:  # takes seconds
        listed = {f"p{index}_{i}": {"type": "integer"} for i in range(2500)}
        return Grammar(kind="json_schema", text=json.dumps({"properties": listed}))

    try:
        async with longest_pause() as longest:
            attacks = [
                asyncio.create_task(grammars.grammar_state(slow(i), tenant="greedy"))
                for i in range(6)
            ]
            await asyncio.sleep(0.05)
            assert await grammars.grammar_state(Grammar(kind="regex", text="abc"), tenant="other")
            assert sum(attack.done() for attack in attacks) <= 2
            assert longest[0] < 0.5
            for attack in attacks:
                attack.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)
    finally:
        grammars.close()


def _asked_of_tokenizer(tools: list[dict[str, Any]]) -> Chat:
    return Chat(model=MODEL, messages=[], sampling=Sampling(), tools=tools, tool_choice="required")
