"""An engine host in front of a server with OpenAI's API, on the in-memory bus."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_engines.config import EnginesConfig
from motet_engines.service import EngineHost
from motet_shared import errors
from motet_shared.messages import Chat, Generate, Grammar, Sampling, Tokens
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from support.checkpoints.tiny_tokenizers import EOS, byte_level, write_folder
from support.peers.scripted_openai import OpenAIServer
from support.running.refusals import refuses
from support.running.until import until

TEXT = "The red circle is left of the blue square."
SCRIPT = byte_level().encode(TEXT).ids
PIECES = [byte_level().decode([number]) for number in range(byte_level().get_vocab_size())]
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


class World:
    """Hold a scripted server, the host in front of it, and a tokenizer's bus."""

    def __init__(self, server: OpenAIServer, tokenizer: Bus, host: EngineHost):
        self.server, self.tokenizer, self.host = server, tokenizer, host


@contextlib.asynccontextmanager
async def world_of(
    folder: Path,
    script: list[int] = SCRIPT,
    prepare: Callable[[OpenAIServer], None] = lambda server: None,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    server = OpenAIServer(script, PIECES, **(model or {}))
    server.prompt = len(PROMPT)
    prepare(server)
    defaults: dict[str, Any] = {"engine_probe": 0.1, "metrics_port": -1}
    config = EnginesConfig(
        engine="openai",
        model=str(folder),
        name="tiny",
        engine_url=server.base,
        **(defaults | settings),
    )
    with server.serving():
        async with (
            memory_buses("tokenizer", "decode") as (tokenizer, bus),
            running(EngineHost(config, bus)) as host,
        ):
            yield World(server, tokenizer, host)
            await idle(host)


async def idle(host: EngineHost) -> None:
    """Wait until no call is active, and require that nothing of one is left."""
    await until(lambda: not host.bus.calls.active)
    host.check_integrity()


def generate(
    max_tokens: int = 100, sampling: dict[str, Any] | None = None, **fields: Any
) -> Generate:
    asked = Sampling(**({"temperature": 0.0, "max_tokens": max_tokens} | (sampling or {})))
    return msgspec.structs.replace(Generate(model="tiny", prompt=PROMPT, sampling=asked), **fields)


async def items(bus: Bus, request: Generate, **options: Any) -> tuple[list[Tokens], Any]:
    found: list[Tokens] = []
    async with bus.open("decode", request, **options) as stream:
        async for body in stream:
            assert isinstance(body, Tokens)
            found.append(body)
    return found, stream.end


def ids_of(found: list[Tokens]) -> list[int]:
    return [number for item in found for number in item.ids]


# --------------------------------------------------------------------------------- the normal course
async def test_token_ids_go_there_and_come_back(folder: Path) -> None:
    async with world_of(folder, engine_key="secret") as world:
        found, end = await items(world.tokenizer, generate())
        assert ids_of(found) == SCRIPT
        assert (end.status, end.usage.prompt_tokens, end.usage.cached_tokens) == ("stop", 3, 3)
        assert {"decode.prefill", "decode.decode"} <= end.timing.keys()
        (body,) = world.server.bodies
        assert (body["prompt"], body["model"], body["return_token_ids"]) == (
            PROMPT,
            "their-model",
            True,
        )
        assert set(world.server.keys) == {"Bearer secret"}
        assert world.host.models()[0].name == "tiny"
        assert world.host.stats()["engine_route"] == "ids"


async def test_a_reply_goes_on_where_another_instance_left_it(folder: Path) -> None:
    async with world_of(folder) as world:
        request = generate(9, output=SCRIPT[:5], sampling={"min_tokens": 7, "seed": 3})
        found, end = await items(world.tokenizer, request)
        assert ids_of(found) == SCRIPT[5:9]
        assert end.status == "length"
        (body,) = world.server.bodies
        assert body["prompt"] == [*PROMPT, *SCRIPT[:5]]
        assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (4, 2, 8)
        found, end = await items(world.tokenizer, generate(5, output=SCRIPT[:5]))
        assert (found, end.status) == ([], "length")


async def test_an_end_token_that_the_server_does_not_know_ends_the_reply(folder: Path) -> None:
    script = [*SCRIPT[:4], EOS, *SCRIPT[4:]]
    async with world_of(folder, script, model={"owned_by": "motet"}) as world:
        found, end = await items(world.tokenizer, generate(sampling={"stop_token_ids": [EOS]}))
        assert ids_of(found) == [*SCRIPT[:4], EOS]
        assert end.status == "stop"
        assert "stop_token_ids" not in world.server.bodies[0]


async def test_sampling_and_grammars_are_passed_on_by_the_names_of_the_server(folder: Path) -> None:
    grammar = Grammar(kind="json_schema", text='{"type":"object"}', param="response_format")
    sampling = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {7: -2.0}}
    async with world_of(folder) as world:
        await items(world.tokenizer, generate(sampling=sampling, grammar=grammar))
        body = world.server.bodies[0]
        assert body["structured_outputs"] == {"json": {"type": "object"}}
        assert body["logit_bias"] == {"7": -2.0}
        assert {name: body[name] for name in ("top_k", "min_p", "repetition_penalty")} == {
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
        }
        framed = msgspec.structs.replace(grammar, frame='start: "<think>" @answer')
        await items(world.tokenizer, generate(grammar=framed))
        lark = world.server.bodies[1]["structured_outputs"]["grammar"]
        assert "%lark" in lark
        assert "@answer" not in lark


async def test_log_probabilities_come_by_ids(folder: Path) -> None:
    async with world_of(folder) as world:
        found, _ = await items(world.tokenizer, generate(3, sampling={"logprobs": 2}))
        entries = [entry for item in found for entry in item.logprobs or []]
        assert [entry.id for entry in entries] == SCRIPT[:3]
        assert entries[0].top == [(SCRIPT[0], -0.5), (1, -2.0)]


async def test_load_is_the_servers_own(folder: Path) -> None:
    metrics = (
        'vllm:num_requests_running{model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{model_name="m"} 2.0\n'
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25\n'
    )
    async with world_of(
        folder, prepare=lambda server: setattr(server, "metrics", metrics)
    ) as world:
        await until(lambda: world.host.load()["running"] == 3.0)
        load = world.host.load()
        assert (load["queued"], load["kv_free"]) == (2.0, 0.75)
        await items(world.tokenizer, generate())
        load = world.host.load()
        assert load["tokens"] == len(PROMPT) + len(SCRIPT)
        assert load["decode_row"] > 0
        assert load["prefill_default"] == 0


async def test_adapters_of_the_server_are_served(folder: Path) -> None:
    def add_adapter(server: OpenAIServer) -> None:
        server.adapters = [{"id": "pirate", "parent": "their-model", "owned_by": "vllm"}]

    async with world_of(folder, prepare=add_adapter) as world:
        cards = {card.name: card.parent for card in world.host.models()}
        assert cards == {"tiny": "", "pirate": "tiny"}
        await items(world.tokenizer, generate(model="pirate"))
        assert world.server.bodies[0]["model"] == "pirate"


# --------------------------------------------------------------------------------------- other routes
async def test_a_server_without_ids_has_its_text_spelled_again(folder: Path) -> None:
    def forget_ids(server: OpenAIServer) -> None:
        server.knows_ids, server.refuses_unknown = False, True

    async with world_of(folder, prepare=forget_ids, model={"owned_by": "x"}) as world:
        assert world.host.stats()["engine_route"] == "text"
        found, _ = await items(world.tokenizer, generate())
        assert byte_level().decode(ids_of(found)) == TEXT
        with refuses(errors.UnsupportedParameter, "logprobs"):
            await items(world.tokenizer, generate(sampling={"logprobs": 0}))


async def test_a_server_that_takes_no_ids_is_sent_chats(folder: Path) -> None:
    def chats_only(server: OpenAIServer) -> None:
        server.takes_ids = False

    messages = [{"role": "user", "content": "Hello"}]
    chat = Chat(model="tiny", messages=messages, sampling=Sampling(), max_tokens=50)
    async with world_of(folder, prepare=chats_only, model={"owned_by": "x"}) as world:
        assert world.host.models()[0].takes_chats
        found, end = await items(world.tokenizer, generate(50, chat=chat))
        assert byte_level().decode(ids_of(found)) == TEXT
        assert end.status == "stop"
        (body,) = world.server.bodies
        assert (body["messages"], body["max_tokens"]) == (messages, 50)
        with refuses(errors.UnsupportedParameter, "prompt"):
            await items(world.tokenizer, generate())
        with refuses(errors.UnsupportedParameter, "tools"):
            tools = msgspec.structs.replace(chat, tools=[{"type": "function"}])
            await items(world.tokenizer, generate(chat=tools))
        with pytest.raises(errors.Overloaded):
            await items(world.tokenizer, generate(chat=chat, output=SCRIPT[:3]))


# ------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("owner", "sampling", "param"),
    [
        ("x", {"top_k": 5}, "top_k"),
        ("x", {"min_tokens": 5}, "min_tokens"),
        ("vllm", {"logprobs": 21}, "logprobs"),
    ],
)
async def test_what_the_server_lacks_is_refused_by_name(
    folder: Path, owner: str, sampling: dict[str, Any], param: str
) -> None:
    async with world_of(folder, model={"owned_by": owner}) as world:
        with refuses(errors.UnsupportedParameter, param):
            await items(world.tokenizer, generate(sampling=sampling))
        if param == "top_k":  # recommended by the model, not requested by the client
            await items(world.tokenizer, generate(sampling=sampling | {"left_out": ["top_k"]}))
            assert "top_k" not in world.server.bodies[0]


async def test_a_grammar_that_the_server_lacks_is_refused_by_name(folder: Path) -> None:
    regex = Grammar(kind="regex", text="a+", param="structured_outputs.regex")
    async with world_of(folder, model={"owned_by": "x"}) as world:
        with refuses(errors.UnsupportedParameter, "structured_outputs.regex"):
            await items(world.tokenizer, generate(grammar=regex))
    async with world_of(folder) as world:
        with pytest.raises(errors.Overloaded):  # only another instance can continue it
            await items(world.tokenizer, generate(grammar=regex, output=SCRIPT[:2]))


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, {"error": {"message": "no", "param": "top_p"}}, errors.BadRequest),
        (422, {"error": {"message": "no", "code": "unsupported_parameter"}}, errors.BadRequest),
        (429, {"error": {"message": "busy"}}, errors.Overloaded),
        (503, {"detail": "busy"}, errors.Overloaded),
        (500, {"error": "broken"}, errors.Unavailable),
        (401, {"error": {"message": "who?"}}, errors.Unavailable),
    ],
)
async def test_refusals_of_the_server_keep_their_kind(
    folder: Path, status: int, body: dict[str, Any], error: type[errors.MotetError]
) -> None:
    async with world_of(folder) as world:
        world.server.failure = (status, body)
        with pytest.raises(error):
            await items(world.tokenizer, generate())
        world.server.failure = None
        await until(lambda: world.host.bus.state == "ready")
        assert ids_of((await items(world.tokenizer, generate()))[0]) == SCRIPT


async def test_the_model_of_another_folder_is_not_served(folder: Path) -> None:
    def respell(server: OpenAIServer) -> None:
        server.pieces = ["else"] * len(PIECES)

    with pytest.raises(errors.ConfigError) as caught:
        async with world_of(folder, prepare=respell):
            pass
    assert caught.value.param == "model"
    with pytest.raises(errors.ConfigError) as caught:
        async with world_of(folder, engine_model="absent"):
            pass
    assert caught.value.param == "engine_model"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"engine_url": ""}, "engine_url"),
        ({"engine_url": "ftp://127.0.0.1/v1"}, "engine_url"),
        ({"engine_url": "http://user:key@127.0.0.1/v1"}, "engine_url"),
    ],
)
def test_wrong_settings_are_named(folder: Path, settings: dict[str, Any], param: str) -> None:
    given = {"engine": "openai", "model": str(folder), "engine_url": "http://127.0.0.1:1/v1"}
    with pytest.raises(errors.ConfigError) as caught:
        EnginesConfig(**(given | settings))
    assert caught.value.param == param


# --------------------------------------------------------------------------- cancels, credit and death
@pytest.mark.parametrize("at", [0, 5])
async def test_leaving_cancels_at_the_server(folder: Path, at: int) -> None:
    async with world_of(folder) as world:
        world.server.pause_at = at
        async with world.tokenizer.open("decode", generate()) as stream:
            if at:
                await anext(stream.batches())
            await until(world.server.paused.is_set)
        await until(lambda: world.server.cancelled == 1)


async def test_a_deadline_cancels_at_the_server(folder: Path) -> None:
    async with world_of(folder) as world:
        world.server.pause_at = 3
        with pytest.raises(errors.DeadlineExceeded):
            await items(world.tokenizer, generate(), deadline=0.5)
        await until(lambda: world.server.cancelled == 1)


async def test_a_reader_that_waits_is_not_sent_more(folder: Path) -> None:
    async with (
        world_of(folder) as world,
        world.tokenizer.open("decode", generate(), window=4) as slow,
    ):
        await until(lambda: slow.received == 4)
        assert ids_of((await items(world.tokenizer, generate()))[0]) == SCRIPT
        assert slow.received == 4
        assert ids_of([body async for body in slow]) == SCRIPT  # type: ignore[misc]


async def test_a_server_that_breaks_a_reply_off_is_left_until_it_answers(folder: Path) -> None:
    async with world_of(folder) as world:
        world.server.break_at = 5
        found: list[int] = []

        async def read() -> None:
            async with world.tokenizer.open("decode", generate()) as stream:
                async for body in stream:
                    found.extend(body.ids)  # type: ignore[union-attr]

        with pytest.raises(errors.Unavailable):
            await read()
        assert found == SCRIPT[:5]
        await until(lambda: world.host.bus.state == "ready")
        rest, _ = await items(world.tokenizer, generate(output=found))
        assert ids_of(rest) == SCRIPT[5:]


@pytest.mark.parametrize("finish", ["abort", "error"])
async def test_a_reply_that_the_server_aborts_is_not_complete(folder: Path, finish: str) -> None:
    async with world_of(folder) as world:
        world.server.finish = finish
        with pytest.raises(errors.Unavailable):
            await items(world.tokenizer, generate())
        world.server.finish = ""
        await until(lambda: world.host.bus.state == "ready")
        assert ids_of((await items(world.tokenizer, generate()))[0]) == SCRIPT


async def test_a_server_that_is_down_takes_no_new_work(folder: Path) -> None:
    async with world_of(folder) as world:
        world.server.down = True
        await until(lambda: world.host.bus.state == "warming")
        with pytest.raises(errors.Draining):
            await items(world.tokenizer, generate(), instance=world.host.bus.instance)
        world.server.down = False
        await until(lambda: world.host.bus.state == "ready")
        assert ids_of((await items(world.tokenizer, generate()))[0]) == SCRIPT
