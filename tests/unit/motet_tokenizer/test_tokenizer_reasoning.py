"""Replies with reasoning through the tokenizer service: divided, counted, moved, replayed, and switched off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import BadRequest, ConfigError, UnsupportedParameter
from motet_shared.messages import Grammar, Resume, Sampling, Text
from motet_shared.testing import die
from motet_tokenizer.config import TokenizerConfig
from support.families.chat_templates import family
from support.stages.tokenizer_stage import TOOL, Answer, Stage, chat, stage_in_memory

QWEN = family("qwen3")
CALL = '<tool_call>\n{"name": "draw", "arguments": {"shape": "star"}}\n</tool_call>'
REPLY = f"<think>\nA star? <Yes>.\n</think>\n\nI draw. Stop.\n{CALL}"
THOUGHT = "A star? <Yes>."
END = QWEN.tokenizer.eos_token_id
SCRIPT = [*QWEN.ids(REPLY), END]
SIZE = SCRIPT.index(QWEN.ids("</think>")[0]) + 1  # tokens of reasoning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return QWEN.write_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage:
        yield stage


def outcome(answer: Answer) -> tuple[str, str, list[tuple[str, str]], str]:
    return answer.reasoning, answer.text, answer.calls, answer.end.status


@pytest.mark.parametrize("step", [1, 2, 50])
async def test_reasoning_text_and_calls_are_apart(stage: Stage, step: int) -> None:
    await stage.decode(SCRIPT, step=step)
    answer = await stage.ask(chat(tools=[TOOL]))
    calls = [("draw", '{"shape": "star"}')]
    assert outcome(answer) == (THOUGHT, "I draw. Stop.", calls, "tool_calls")
    assert answer.ids == SCRIPT
    assert answer.end.usage is not None
    assert answer.end.usage.reasoning_tokens == SIZE
    assert answer.end.usage.completion_tokens == len(SCRIPT)
    assert stage.tokenizer.models()[0].reasoning


async def test_stop_strings_and_logprobs_are_of_the_answer(stage: Stage) -> None:
    await stage.decode(SCRIPT, step=3)
    answer = await stage.ask(chat(stop=["star", "Stop"], sampling=Sampling(logprobs=0)))
    assert outcome(answer) == (THOUGHT, "I draw. ", [], "stop")
    entries = [entry for item in answer.items for entry in item.logprobs or ()]
    assert b"".join([entry.token for entry in entries]).startswith(b"I draw. ")


async def test_a_reply_cut_in_its_reasoning_has_no_text(stage: Stage) -> None:
    await stage.decode(SCRIPT)
    answer = await stage.ask(chat(max_tokens=4))
    assert THOUGHT.startswith(answer.reasoning)
    assert (answer.text, answer.end.status) == ("", "length")
    assert answer.end.usage is not None
    assert answer.end.usage.reasoning_tokens == 4


@pytest.mark.parametrize("at", [1, 5, SIZE, SIZE + 4])
async def test_a_reply_moves_in_the_midst_of_its_reasoning(stage: Stage, at: int) -> None:
    first = await stage.decode(SCRIPT)
    first.pause_at = at
    asking = asyncio.create_task(stage.ask(chat(tools=[TOOL])))
    await first.paused.wait()
    second = await stage.decode(SCRIPT)
    die(first.bus)
    answer = await asking
    calls = [("draw", '{"shape": "star"}')]
    assert outcome(answer) == (THOUGHT, "I draw. Stop.", calls, "tool_calls")
    assert second.requests[0].output == SCRIPT[:at]
    assert answer.end.usage is not None
    assert answer.end.usage.reasoning_tokens == SIZE


async def test_resumed_anywhere_the_rest_is_the_same(stage: Stage) -> None:
    await stage.decode(SCRIPT)
    whole = await stage.ask(chat(tools=[TOOL]))
    for at in range(1, len(whole.items)):
        seen, rest = Answer(), Answer()
        seen.items = whole.items[:at]
        request = chat(tools=[TOOL], resume=Resume(seen.ids, sum(map(length, seen.items))))
        rest.items, rest.end = (
            [*seen.items, *(answer := await stage.ask(request)).items],
            answer.end,
        )
        assert outcome(rest) == outcome(whole), at
        assert rest.end.usage == whole.end.usage


def length(item: Text) -> int:
    """As `messages.Resume` counts."""
    return (
        len(item.reasoning) + len(item.text) + sum(len(one.arguments) for one in item.tools or ())
    )


# ------------------------------------------------------------------------------------- switches
async def test_a_switched_off_model_answers_at_once(stage: Stage) -> None:
    decode = await stage.decode([*QWEN.ids("<think> is a tag."), END])
    for fields in ({"reasoning_effort": "none"}, {"template_options": {"enable_thinking": False}}):
        answer = await stage.ask(chat(**fields))
        assert outcome(answer) == ("", "<think> is a tag.", [], "stop")
        prompt = QWEN.tokenizer.decode(decode.requests[-1].prompt)
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
    for fields in ({"reasoning_effort": "high"}, {"template_options": {"enable_thinking": True}}):
        await stage.ask(chat(**fields))
        prompt = QWEN.tokenizer.decode(decode.requests[-1].prompt)
        assert prompt.endswith("assistant\n")


async def test_a_grammar_is_framed_by_the_reasoning(stage: Stage) -> None:
    decode = await stage.decode(SCRIPT)
    shape = Grammar(kind="regex", text="[a-z]+", param="structured_outputs.regex")
    await stage.ask(chat(grammar=shape))
    asked = decode.requests[-1].grammar
    assert asked is not None
    assert (asked.text, "think" in asked.frame) == (shape.text, True)
    await stage.ask(chat(grammar=shape, reasoning_effort="none"))
    assert decode.requests[-1].grammar == shape
    await stage.ask(chat(tools=[TOOL], tool_choice="required"))
    asked = decode.requests[-1].grammar
    assert asked is not None
    assert "think" in asked.frame


async def test_history_goes_back_as_the_template_wants(stage: Stage) -> None:
    decode = await stage.decode(SCRIPT)
    call = {"id": "a", "type": "function", "function": {"name": "draw", "arguments": "{}"}}
    reply = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm <think>",
        "tool_calls": [call],
    }
    asked = {"role": "user", "content": "Draw."}
    result = {"role": "tool", "tool_call_id": "a", "content": "done"}
    await stage.ask(chat(messages=[asked, reply, result]))
    kept = QWEN.tokenizer.decode(decode.requests[-1].prompt)
    assert "<think>\nHm <think>\n</think>" in kept
    opened = decode.requests[-1].prompt.count(QWEN.ids("<think>")[0])
    assert opened == 1  # the client's own tag is text
    await stage.ask(chat(messages=[asked, reply, result, asked]))
    assert "Hm" not in QWEN.tokenizer.decode(decode.requests[-1].prompt)


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        (
            {"template_options": {"add_generation_prompt": False}},
            UnsupportedParameter,
            "chat_template_kwargs.add_generation_prompt",
        ),
        (
            {"template_options": {"messages": []}},
            UnsupportedParameter,
            "chat_template_kwargs.messages",
        ),
        ({"template_options": {"fast": 1}}, UnsupportedParameter, "chat_template_kwargs.fast"),
        ({"template_options": {"enable_thinking": "x" * 5000}}, BadRequest, "chat_template_kwargs"),
    ],
)
async def test_what_the_template_does_not_read_is_refused(
    stage: Stage, fields: dict[str, Any], error: type[BadRequest], param: str
) -> None:
    with pytest.raises(error) as raised:
        await stage.ask(chat(**fields))
    assert raised.value.param == param


# ------------------------------------------------------------------------------------- other models
@pytest.mark.parametrize(
    ("name", "effort", "served"),
    [
        ("chatml", "none", True),
        ("chatml", "low", False),
        ("deepseek", "none", False),
        ("deepseek", "high", True),
    ],
)
async def test_an_effort_that_cannot_be_met_is_refused(
    name: str, effort: str, served: bool, tmp_path: Path
) -> None:
    async with stage_in_memory(family(name).write_folder(tmp_path)) as stage:
        await stage.decode(family(name).ids("Yes"))
        if served:
            assert (await stage.ask(chat(reasoning_effort=effort))).text == "Yes"
            return
        with pytest.raises(UnsupportedParameter) as raised:
            await stage.ask(chat(reasoning_effort=effort))
        assert raised.value.param == "reasoning_effort"


async def test_the_setting_goes_before_the_template(folder: Path) -> None:
    async with stage_in_memory(folder, reasoning_format="none") as stage:
        await stage.decode(SCRIPT)
        answer = await stage.ask(chat())
        assert (answer.reasoning, answer.text) == ("", REPLY)
        assert not stage.tokenizer.models()[0].reasoning
    with pytest.raises(ConfigError) as raised:
        TokenizerConfig(model=("m=/m",), reasoning_format="loud")
    assert raised.value.param == "reasoning_format"


async def test_a_template_may_open_the_reasoning(tmp_path: Path) -> None:
    opened = QWEN.template.replace(
        "{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    )
    path = QWEN.write_folder(tmp_path)
    (path / "chat_template.jinja").write_text(opened)
    async with stage_in_memory(path) as stage:
        decode = await stage.decode([*QWEN.ids("Hm.\n</think>\n\nYes."), END])
        answer = await stage.ask(chat())
        assert outcome(answer) == ("Hm.", "Yes.", [], "stop")
        assert QWEN.tokenizer.decode(decode.requests[0].prompt).endswith("assistant\n<think>\n")
