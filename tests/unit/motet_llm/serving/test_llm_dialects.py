"""Models that reason, with a real tokenizer service and a real engine: grammars hold the answer alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.messages import Grammar, Resume, Sampling
from motet_shared.testing import memory_bus, running, settle
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.families.chat_templates import Family, family
from support.services.scripted_decode import MODEL
from support.stages.tokenizer_stage import Answer, Stage, chat, stage_in_memory

SHAPE = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "star"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["shape", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "draw", "parameters": SHAPE}}
ANSWER = Grammar(kind="json_schema", text=json.dumps(SHAPE), param="response_format")
THOUGHT = 'A {"shape": "moon"}, </th'
# By family: how a reply begins that reasons, and the tokens that end the reasoning and choose an answer or a call.
BEGINNINGS = {
    "qwen3": (f"<think>\n{THOUGHT}", ["</think>"], ["</think>"]),
    "harmony": (
        f"<|channel|>analysis<|message|>{THOUGHT}",
        ["<|end|>", "final"],
        ["<|end|>", "commentary", " to"],
    ),
}
pytestmark = pytest.mark.long(after=1)


@pytest.fixture(scope="module", params=BEGINNINGS)
def model(request: pytest.FixtureRequest) -> Family:
    return family(request.param)


@pytest.fixture(scope="module")
def folder(model: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(model.name)
    size = len(model.tokenizer)
    end = model.tokenizer.eos_token_id
    tiny_checkpoint("llama", path, hidden_size=32, head_dim=8, vocab_size=size, eos_token_id=end)
    model.tokenizer.save_pretrained(path)
    return path


@asynccontextmanager
async def engine(stage: Stage, folder: Path, **settings: Any) -> AsyncIterator[Decode]:
    config = DecodeConfig(
        model=str(folder), name=MODEL, num_blocks=128, threads=1, metrics_port=-1, **settings
    )
    async with running(Decode(config, await memory_bus(stage.hub, "decode"))) as decode:
        await settle()
        yield decode


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage, engine(stage, folder):
        yield stage


async def continued(
    stage: Stage, model: Family, ids: list[int], sent: int, *, calls: bool = False, **fields: Any
) -> Answer:
    """Continue a reply of which a client has `ids`, with `sent` characters, to an answer or a call."""
    likely = BEGINNINGS[model.name][2 if calls else 1]
    bias = {model.ids(text)[0]: 100.0 - 30 * at for at, text in enumerate(likely)}
    request = chat(sampling=Sampling(seed=7, logit_bias=bias), max_tokens=200, **fields)
    request.resume = Resume(ids, sent)
    return await stage.ask(request)


def begun(model: Family) -> tuple[list[int], int]:
    """The tokens of a reply that has begun to reason, and how many characters of it are certain."""
    certain = THOUGHT.removesuffix("</th") if model.name == "qwen3" else THOUGHT
    return model.ids(BEGINNINGS[model.name][0]), len(certain.rstrip())


async def test_an_answer_follows_its_schema_behind_free_reasoning(
    stage: Stage, model: Family
) -> None:
    ids, sent = begun(model)
    answer = await continued(stage, model, ids, sent, grammar=ANSWER)
    assert answer.end.status == "stop"
    assert jsonschema_rs.validator_for(SHAPE).is_valid(json.loads(answer.text)), answer.text
    assert answer.reasoning == THOUGHT[sent:]
    assert answer.end.usage is not None
    assert answer.end.usage.reasoning_tokens > len(ids)


async def test_a_required_call_comes_behind_free_reasoning(stage: Stage, model: Family) -> None:
    ids, sent = begun(model)
    wish: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "tool": "draw"}
    answer = await continued(stage, model, ids, sent, calls=True, **wish)
    assert (answer.end.status, answer.text) == ("tool_calls", ""), model.tokenizer.decode(
        answer.ids
    )
    ((name, arguments),) = answer.calls
    assert name == "draw"
    assert jsonschema_rs.validator_for(SHAPE).is_valid(json.loads(arguments))


async def test_a_reply_goes_on_from_any_token(stage: Stage, model: Family) -> None:
    ids, sent = begun(model)
    rest = await continued(stage, model, ids, sent, grammar=ANSWER)
    for at in range(0, len(rest.items), 9):
        seen = Answer()
        seen.items = rest.items[:at]
        known = sent + len(seen.reasoning + seen.text)
        again = await continued(stage, model, [*ids, *seen.ids], known, grammar=ANSWER)
        assert seen.ids + again.ids == rest.ids
        assert seen.reasoning + again.reasoning == rest.reasoning
        assert seen.text + again.text == rest.text
        assert again.end.usage is not None
        assert rest.end.usage is not None
        assert again.end.usage.reasoning_tokens == rest.end.usage.reasoning_tokens


async def test_guesses_change_no_reply(stage: Stage, folder: Path, model: Family) -> None:
    ids, sent = begun(model)
    plain = await continued(stage, model, ids, sent, grammar=ANSWER)
    async with stage_in_memory(folder) as other, engine(other, folder, speculate="ngram"):
        guessed = await continued(other, model, ids, sent, grammar=ANSWER)
    assert (guessed.ids, guessed.reasoning, guessed.text) == (
        plain.ids,
        plain.reasoning,
        plain.text,
    )
