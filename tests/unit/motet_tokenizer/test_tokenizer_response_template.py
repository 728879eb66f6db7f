"""Checkpoints with a response template: replies are what transformers' `parse_response` makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import ConfigError, UnsupportedParameter
from motet_shared.messages import Resume
from motet_shared.testing import die
from motet_tokenizer.encoding.vocabulary import Vocabulary
from motet_tokenizer.response_template import ResponseFormat, ResponseTemplateParser
from support.families.chat_templates import Family, family
from support.stages.tokenizer_stage import Answer, Stage, chat, stage_in_memory

QWEN: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}
# Calls in JSON without quotes, between tokens that are special.
GEMMA: dict[str, Any] = {
    "start_anchor": "<start_of_turn>model\n",
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": ["<end_of_turn>"]},
    },
}
SHAPE = {
    "type": "object",
    "properties": {"shape": {"type": "string"}, "size": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": "draw", "parameters": SHAPE}}]
CALL = '<tool_call>\n{"name": "draw", "arguments": {"shape": "a é", "size": "3"}}\n</tool_call>'
GEMMA_CALL = '<|tool_call>call:draw{shape:<|"|>a é<|"|>,size:3}<tool_call|>'


@dataclass(frozen=True)
class Model:
    """A family whose tokenizer has a response template, and replies of it."""

    family: Family
    template: dict[str, Any]
    replies: tuple[str, ...]

    def write_folder(self, path: Path) -> Path:
        self.family.write_folder(path)
        settings = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(
            json.dumps({**settings, "response_template": self.template})
        )
        return path


def _gemma() -> Family:
    plain = family("gemma")
    added = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
    return Family("gemma4", plain.template, (*plain.special[:-1], *added, plain.special[-1]))


MODELS = {
    "qwen": Model(
        family("qwen3"),
        QWEN,
        (
            "<think>\nA star?\n</think>\n\nI draw. Now.\n" + CALL,
            "No thought, <th a < b, no call <tool\n",
            f"<think>\nHm.\n</think>\n\n{CALL}\n{CALL}",
            "<think>cut in its reasoning </th",
        ),
    ),
    "gemma": Model(
        _gemma(),
        GEMMA,
        (
            f"<|channel>thought\nA star?\n<channel|>I draw.{GEMMA_CALL}",
            "Nothing but text.",
            GEMMA_CALL + GEMMA_CALL,
        ),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model.write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage:
        yield stage


def outcome(answer: Answer) -> tuple[str, str, list[tuple[str, Any]], str]:
    calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    return answer.reasoning, answer.text, calls, answer.end.status


def expected(
    model: Model, reply: str, prompt: list[int]
) -> tuple[str, str, list[tuple[str, Any]], str]:
    """What transformers makes of the reply."""
    tokenizer = model.family.tokenizer
    message = tokenizer.parse_response(
        reply, model.template, prefix=tokenizer.decode(prompt), tools=TOOLS
    )
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    return reasoning, message.get("content") or "", calls, "tool_calls" if calls else "stop"


@pytest.mark.parametrize("step", [1, 4, 99])
async def test_a_reply_is_what_transformers_parses(model: Model, stage: Stage, step: int) -> None:
    card = stage.tokenizer.models()[0]
    assert (card.tools, card.reasoning) == (True, True)
    decode = await stage.decode(step=step)
    for reply in model.replies:
        decode.script = [*model.family.ids(reply), model.family.tokenizer.eos_token_id]
        answer = await stage.ask(chat(tools=TOOLS))
        wanted = expected(model, reply, decode.requests[-1].prompt)
        assert outcome(answer) == wanted
        assert answer.end.usage is not None
        assert (answer.end.usage.reasoning_tokens > 0) == bool(wanted[0])


async def test_a_reply_moves_and_is_resumed_at_any_token(model: Model, stage: Stage) -> None:
    script = [*model.family.ids(model.replies[0]), model.family.tokenizer.eos_token_id]
    decode = await stage.decode(script)
    whole = await stage.ask(chat(tools=TOOLS))
    for at in range(1, len(script), 9):
        decode.pause_at = at
        asking = asyncio.create_task(stage.ask(chat(tools=TOOLS)))
        await decode.paused.wait()
        lost, decode = decode, await stage.decode(script)
        die(lost.bus)
        assert outcome(await asking) == outcome(whole), at
    for at in range(1, len(whole.items), 5):
        seen = Answer()
        seen.items = whole.items[:at]
        sent = len(seen.reasoning + seen.text) + sum(len(call[1]) for call in seen.calls)
        rest = await stage.ask(chat(tools=TOOLS, resume=Resume(seen.ids, sent)))
        rest.items = [*seen.items, *rest.items]
        assert outcome(rest) == outcome(whole), at


async def test_without_tools_a_call_is_text(model: Model, stage: Stage) -> None:
    await stage.decode([*model.family.ids(model.replies[-1]), model.family.tokenizer.eos_token_id])
    answer = await stage.ask(chat())
    assert answer.calls == []


async def test_constraints_need_a_grammar(model: Model, stage: Stage) -> None:
    decode = await stage.decode(model.family.ids("Yes"))
    if model.template is QWEN:  # whose chat template shows a format that has one
        await stage.ask(chat(tools=TOOLS, tool_choice="required"))
        grammar = decode.requests[-1].grammar
        assert grammar is not None
        assert "draw" in grammar.text
        return
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tools": False}, "tools"),
    ):
        request = chat(tools=TOOLS)
        for name, value in fields.items():
            setattr(request, name, value)
        with pytest.raises(UnsupportedParameter) as raised:
            await stage.ask(request)
        assert raised.value.param == param


# --------------------------------------------------------------------------------------- the parser
def parse(template: dict[str, Any], reply: str, cuts: int = 1) -> tuple[str, str, list[Any]]:
    parser = ResponseFormat(template, "m", []).parser(lambda count: "", "r", TOOLS)
    assert isinstance(parser, ResponseTemplateParser)
    pieces = [reply[at : at + cuts] for at in range(0, len(reply), cuts)]
    parts = [*[parser.feed("", piece) for piece in pieces], parser.flush("")]
    calls = [delta for part in parts for delta in part.tools or ()]
    assert len(calls) == parser.calls
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.text for part in parts),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


@pytest.mark.parametrize("reply", MODELS["qwen"].replies)
def test_cuts_do_not_matter(reply: str) -> None:
    whole = parse(QWEN, reply, len(reply))
    for cuts in (1, 2, 3, 7):
        assert parse(QWEN, reply, cuts) == whole


def test_a_call_that_cannot_be_parsed_stays_text() -> None:
    for cuts in (1, 999):
        reply = 'Look: <tool_call>{"name": oh}</tool_call> so ' + CALL
        _, text, calls = parse(QWEN, reply, cuts)
        assert calls == [("draw", {"shape": "a é", "size": 3})]
        assert text == 'Look:{"name": oh}\nso'
    assert parse(QWEN, '<tool_call>{"no": "name"}</tool_call>')[2] == []


def test_an_invalid_template_is_refused() -> None:
    tokenizer = family("qwen3").tokenizer
    config = {"max_position_embeddings": 64}
    wrong: list[Any] = [{"fields": {}}, {"fields": {"content": {"open": 1}}}, "text"]
    for template in wrong:
        tokenizer.response_template = template
        try:
            with pytest.raises(ConfigError) as raised:
                Vocabulary("m", tokenizer, config, {})
        finally:
            tokenizer.response_template = None
        assert raised.value.param == "model"


async def test_settings_go_before_the_response_template(tmp_path: Path) -> None:
    path = MODELS["qwen"].write_folder(tmp_path)
    async with stage_in_memory(path, tool_format="llama3") as stage:
        assert stage.tokenizer.vocabularies["tiny"].dialect.response is None
