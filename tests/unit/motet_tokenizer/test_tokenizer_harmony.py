"""Replies of gpt-oss through the tokenizer service: channels, calls, moves, and what goes back to the template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet_shared.errors import UnsupportedParameter
from motet_shared.messages import Grammar, Sampling
from motet_shared.testing import die
from support.families.chat_templates import family
from support.stages.tokenizer_stage import TOOL, Answer, Stage, chat, stage_in_memory

GPT = family("harmony")
THOUGHT = "<|channel|>analysis<|message|>Grüße, 👩‍🚀?<|end|><|start|>assistant"
ANSWER = GPT.ids(f"{THOUGHT}<|channel|>final<|message|>Hello, naïve one.<|return|>")
CALL = GPT.ids(
    f"{THOUGHT}<|channel|>commentary<|message|>I draw.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{"shape": "star"}<|call|>'
)
CALLS = [("draw", '{"shape": "star"}')]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GPT.write_folder(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage:
        yield stage


def outcome(answer: Answer) -> tuple[str, str, list[tuple[str, str]], str]:
    return answer.reasoning, answer.text, answer.calls, answer.end.status


@pytest.mark.parametrize("step", [1, 3, 99])
async def test_channels_are_apart(stage: Stage, step: int) -> None:
    decode = await stage.decode(ANSWER, step=step)
    answer = await stage.ask(chat(tools=[TOOL]))
    assert outcome(answer) == ("Grüße, 👩‍🚀?", "Hello, naïve one.", [], "stop")
    assert answer.end.usage is not None
    assert answer.end.usage.reasoning_tokens == ANSWER.index(GPT.ids("<|end|>")[0]) + 1
    decode.script = CALL
    answer = await stage.ask(chat(tools=[TOOL]))
    assert outcome(answer) == ("Grüße, 👩‍🚀?", "I draw.", CALLS, "tool_calls")


async def test_a_call_ends_a_reply_although_the_config_does_not_say_so(stage: Stage) -> None:
    decode = await stage.decode([*CALL, *ANSWER])
    answer = await stage.ask(chat(tools=[TOOL]))
    assert (answer.ids, answer.end.status) == (CALL, "tool_calls")
    assert set(GPT.ids("<|call|><|return|>")) <= set(decode.requests[0].sampling.stop_token_ids)


async def test_log_probabilities_are_of_the_answer(stage: Stage) -> None:
    await stage.decode(ANSWER, step=2)
    answer = await stage.ask(chat(sampling=Sampling(logprobs=0)))
    entries = [entry for item in answer.items for entry in item.logprobs or ()]
    assert b"".join([entry.token for entry in entries]).decode() == "Hello, naïve one."


@pytest.mark.parametrize("script", [ANSWER, CALL], ids=["answer", "call"])
async def test_a_reply_moves_at_any_token(stage: Stage, script: list[int]) -> None:
    decode = await stage.decode(script)
    whole = outcome(await stage.ask(chat(tools=[TOOL])))
    for at in range(1, len(script) - 1, 7):
        decode.pause_at = at
        asking = asyncio.create_task(stage.ask(chat(tools=[TOOL])))
        await decode.paused.wait()
        lost, decode = decode, await stage.decode(script)
        die(lost.bus)
        assert outcome(await asking) == whole, at


async def test_grammars_begin_on_the_final_channel(stage: Stage) -> None:
    decode = await stage.decode(ANSWER)
    shape = Grammar(kind="regex", text="[a-z]+", param="structured_outputs.regex")
    await stage.ask(chat(grammar=shape))
    asked = decode.requests[-1].grammar
    assert asked is not None
    assert (asked.text, '"final"' in asked.frame) == (shape.text, True)
    await stage.ask(chat(tools=[TOOL], tool_choice="required"))
    asked = decode.requests[-1].grammar
    assert asked is not None
    assert ("functions.draw" in asked.text, '"final"' in asked.frame) == (True, False)


async def test_the_effort_goes_to_the_template(stage: Stage) -> None:
    decode = await stage.decode(ANSWER)
    for effort in ("low", "high"):
        await stage.ask(chat(reasoning_effort=effort))
        assert f"Reasoning: {effort}" in GPT.tokenizer.decode(decode.requests[-1].prompt)
    for effort in ("none", "minimal", "xhigh"):
        with pytest.raises(UnsupportedParameter) as raised:
            await stage.ask(chat(reasoning_effort=effort))
        assert raised.value.param == "reasoning_effort"


async def test_reasoning_before_a_call_goes_back_until_it_is_answered(stage: Stage) -> None:
    decode = await stage.decode(ANSWER)
    call = {"id": "a", "type": "function", "function": {"name": "draw", "arguments": "{}"}}
    asked = {"role": "user", "content": "Draw."}
    reply = {
        "role": "assistant",
        "content": "I draw.",
        "reasoning_content": "Hm <|channel|>.",
        "tool_calls": [call],
    }
    result = {"role": "tool", "tool_call_id": "a", "name": "draw", "content": "done"}
    await stage.ask(chat(messages=[asked, reply, result]))
    prompt = GPT.tokenizer.decode(decode.requests[-1].prompt)
    assert "analysis<|message|>Hm <|channel|>.\n\nI draw.<|end|>" in prompt
    channel = GPT.ids("<|channel|>")[0]
    assert decode.requests[-1].prompt.count(channel) == prompt.count("<|channel|>") - 1


async def test_reasoning_that_is_switched_off_does_not_leak_channels(folder: Path) -> None:
    async with stage_in_memory(folder, reasoning_format="none") as stage:
        await stage.decode(ANSWER)
        answer = await stage.ask(chat())
        assert answer.text == "Hello, naïve one."


async def test_tools_of_an_unknown_format_are_refused(tmp_path: Path) -> None:
    async with stage_in_memory(family("gemma").write_folder(tmp_path)) as stage:
        assert not stage.tokenizer.models()[0].tools
        await stage.decode(family("gemma").ids("Yes"))
        for choice in ("auto", "required"):
            with pytest.raises(UnsupportedParameter) as raised:
                await stage.ask(chat(tools=[TOOL], tool_choice=choice))
            assert raised.value.param == "tools"
        assert (await stage.ask(chat(tools=[TOOL], tool_choice="none"))).text == "Yes"
    async with stage_in_memory(tmp_path, tool_format="hermes") as stage:
        assert stage.tokenizer.models()[0].tools
        await stage.decode(family("gemma").ids('<tool_call>{"name": "draw", "arguments": {}}'))
        assert (await stage.ask(chat(tools=[TOOL]))).calls == [("draw", "{}")]
