"""Grammars behind the wire: compiled beside the steps of others, refused alone, rebuilt after a move."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from motet_llm.config import DecodeConfig
from motet_llm.grammar import compiler as grammars
from motet_llm.grammar import grammar as grammar_module
from motet_llm.service import Decode
from motet_shared.errors import BadRequest, DeadlineExceeded
from motet_shared.messages import End, Generate, Grammar, Sampling, Tokens
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from support.checkpoints.language_checkpoints import tiny_checkpoint

CHOICE = ["red", "green", "blue"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "tiny"
    path.mkdir()
    return tiny_checkpoint("llama", path, hidden_size=32, head_dim=8)


@pytest.fixture
async def world(folder: Path) -> AsyncIterator[tuple[Bus, Decode]]:
    config = DecodeConfig(
        model=str(folder), num_blocks=64, threads=1, metrics_port=-1, grammar_timeout=30.0
    )
    async with (
        memory_buses("tokenizer", "decode") as (tokenizer, bus),
        running(Decode(config, bus)) as actor,
    ):
        yield tokenizer, actor


def generate(kind: Any = "choice", text: Any = CHOICE, **fields: Any) -> Generate:
    text = text if isinstance(text, str) else json.dumps(text)
    grammar = Grammar(kind=kind, text=text, param="structured_outputs." + kind) if kind else None
    sampling = Sampling(seed=5, max_tokens=40, ignore_eos=grammar is None)
    return Generate(model="tiny", prompt=[5, 6, 7], sampling=sampling, grammar=grammar, **fields)


async def reply(bus: Bus, request: Generate, **options: Any) -> tuple[list[int], End]:
    found: list[int] = []
    async with bus.open("decode", request, **options) as stream:
        async for body in stream:
            assert isinstance(body, Tokens)
            found += body.ids
    assert stream.end is not None
    return found, stream.end


async def test_a_reply_is_held_to_its_grammar_and_counted(
    world: tuple[Bus, Decode], folder: Path
) -> None:
    bus, actor = world
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for _ in range(2):
        ids, end = await reply(bus, generate())
        assert tokenizer.decode(ids) in CHOICE
        assert end.status == "stop"
        assert end.timing["decode.grammar"] >= 0
    stats = actor.stats()
    assert (stats["grammars_compiled"], stats["grammar_hits"], stats["grammars_waiting"]) == (
        1,
        1,
        0,
    )
    assert stats["masked_steps"] == 2 * len(ids)
    assert stats["mask_seconds"] > 0
    actor.check_integrity()


async def test_a_moved_reply_goes_on(world: tuple[Bus, Decode]) -> None:
    bus, _ = world
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    whole, _ = await reply(bus, generate("json_schema", schema))
    for cut in (1, len(whole) // 2, len(whole)):
        rest, end = await reply(bus, generate("json_schema", schema, output=whole[:cut]))
        assert rest == whole[cut:]
        assert end.usage is not None
        assert end.usage.completion_tokens == len(whole)


async def test_a_bad_grammar_is_refused_and_nobody_else(world: tuple[Bus, Decode]) -> None:
    bus, actor = world
    free = asyncio.create_task(reply(bus, generate(None)))
    for kind, text in (
        ("regex", "(open"),
        ("json_schema", {"$ref": "#"}),
        ("grammar", 'start: "a" start'),
    ):
        with pytest.raises(BadRequest) as caught:
            await reply(bus, generate(kind, text))
        assert caught.value.param == f"structured_outputs.{kind}"
    ids, end = await free
    assert (len(ids), end.status) == (40, "length")
    assert actor.stats()["grammars_refused"] == 3
    actor.check_integrity()


async def test_no_step_waits_for_a_grammar(
    world: tuple[Bus, Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, actor = world
    compiling, go_on = asyncio.Event(), False
    loop = asyncio.get_running_loop()

    def slowly(*args: Any) -> Any:
        loop.call_soon_threadsafe(compiling.set)
        while not go_on:
            time.sleep(0.01)
        return compile_(*args)

    compile_ = grammar_module.Grammar
    monkeypatch.setattr(grammars, "Grammar", slowly)
    held = asyncio.create_task(reply(bus, generate()))
    await asyncio.wait_for(compiling.wait(), 60)
    assert len((await reply(bus, generate(None)))[0]) == 40
    assert actor.stats()["grammars_waiting"] == 1
    with pytest.raises(DeadlineExceeded):
        await reply(bus, generate(), deadline=0.2)
    go_on = True
    assert (await held)[1].status == "stop"
