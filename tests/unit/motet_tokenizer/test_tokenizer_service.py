"""The tokenizer service over the in-memory bus: the normal course, and requests that are wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_pipelines.chat.tokens import count_tokens, detokenize, tokenize
from motet_shared.errors import BadRequest, ContextTooLong, UnknownModel
from motet_shared.messages import (
    Complete,
    Detokenize,
    Grammar,
    Resume,
    Sampling,
    States,
    Tokenize,
)
from motet_shared.testing import settle
from motet_tokenizer.generation import RequestCounters
from support.checkpoints.tiny_tokenizers import CONTEXT, EOS, byte_level, write_folder
from support.services.scripted_decode import MODEL
from support.stages.tokenizer_stage import CALL, REPLY, SCRIPT, TOOL, Stage, chat, stage_in_memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stage(folder: Path) -> AsyncIterator[Stage]:
    async with stage_in_memory(folder) as stage:
        yield stage


# ---------------------------------------------------------------------------------------------------- the normal course
@pytest.mark.parametrize("step", [1, 3])
async def test_a_chat_from_text_to_text(stage: Stage, step: int) -> None:
    decode = await stage.decode(step=step)
    answer = await stage.ask(chat())
    assert answer.text == REPLY
    assert answer.ids == SCRIPT
    prompt = decode.requests[0].prompt
    assert (
        byte_level().decode(prompt, skip_special_tokens=False).startswith("<|im_start|>user\nHello")
    )
    assert answer.end.status == "stop"
    assert answer.end.usage is not None
    usage = answer.end.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (
        len(prompt),
        len(SCRIPT),
        4,
    )
    assert {"tokenizer.encode", "tokenizer.total", "decode.prefill"} <= answer.end.timing.keys()
    stats = stage.tokenizer.stats()
    assert (stats["active"], stats["tokens"], stats["failovers"]) == (0, len(SCRIPT), 0)


async def test_decode_is_asked_for_what_the_client_wants(stage: Stage) -> None:
    decode = await stage.decode()
    await stage.ask(
        chat(sampling=Sampling(temperature=0.5, seed=9, stop_token_ids=[5]), max_tokens=4)
    )
    asked = decode.requests[0].sampling
    assert (asked.temperature, asked.seed, asked.max_tokens) == (0.5, 9, 4)
    assert asked.stop_token_ids == [EOS, 5]
    await stage.ask(chat(sampling=Sampling(ignore_eos=True)))
    assert decode.requests[1].sampling.stop_token_ids == []
    assert decode.requests[1].sampling.max_tokens == CONTEXT - len(decode.requests[1].prompt)


async def test_length(stage: Stage) -> None:
    await stage.decode()
    answer = await stage.ask(chat(max_tokens=5))
    assert (answer.ids, answer.end.status) == (SCRIPT[:5], "length")


async def test_a_stop_string_cancels_decode(stage: Stage) -> None:
    decode = await stage.decode()
    decode.pause_at = next(
        n for n in range(len(SCRIPT)) if "blue" in byte_level().decode(SCRIPT[:n])
    )
    answer = await stage.ask(chat(stop=["blue"]))
    assert answer.text == REPLY[: REPLY.index("blue")]
    assert answer.end.status == "stop"
    assert answer.end.usage is not None
    assert answer.end.usage.completion_tokens == len(answer.ids) < len(SCRIPT)
    await settle()
    assert decode.cancelled == 1


async def test_the_end_names_the_stop_string(stage: Stage) -> None:
    await stage.decode()
    assert (await stage.ask(chat(stop=["xyz", "circles"]))).end.stop == "circles"
    assert (await stage.ask(chat(stop=["xyz"]))).end.stop == ""


async def test_tool_calls(stage: Stage) -> None:
    await stage.decode([*byte_level().encode(CALL).ids, EOS])
    answer = await stage.ask(chat(tools=[TOOL]))
    deltas = [delta for item in answer.items for delta in item.tools or ()]
    assert (answer.text, answer.end.status) == ("I draw.", "tool_calls")
    assert (deltas[0].name, "".join([delta.arguments for delta in deltas])) == (
        "draw",
        '{"shape": "star"}',
    )
    plain = await stage.ask(chat(tools=[TOOL], tool_choice="none"))
    assert (plain.text, plain.end.status) == (CALL, "stop")


async def test_states_end_where_a_tool_call_begins(stage: Stage) -> None:
    """A talker speaks what it gets states of."""
    ids = [*byte_level().encode(CALL).ids, EOS]
    await stage.decode(ids)
    opening = byte_level().token_to_id("<tool_call>")
    assert opening is not None
    lead = ids.index(opening)
    for tools, due in (([TOOL], lead), ([], len(ids))):
        asked = chat(tools=tools, return_states=True)
        async with stage.gateway.open("tokenizer", asked) as stream:
            found = [item async for item in stream if isinstance(item, States)]
        first = found[0].prompt_tokens
        assert [item.ref.start - first for item in found] == list(range(due))


async def test_a_grammar_goes_to_decode_with_its_request(stage: Stage) -> None:
    decode = await stage.decode()
    shape = Grammar(kind="regex", text="[a-z]+", param="structured_outputs.regex")
    await stage.ask(chat(grammar=shape))
    assert decode.requests[-1].grammar == shape
    await stage.ask(
        Complete(model=MODEL, prompt="Once", sampling=Sampling(), max_tokens=3, grammar=shape)
    )
    assert decode.requests[-1].grammar == shape
    await stage.ask(chat(tools=[TOOL], tool_choice="required"))
    calls = decode.requests[-1].grammar
    assert calls is not None
    assert calls.kind == "grammar"
    assert "draw" in calls.text
    with pytest.raises(BadRequest) as caught:
        await stage.ask(chat(tools=[TOOL], tool_choice="required", tool="paint"))
    assert caught.value.param == "tool_choice"


async def test_logprobs_carry_the_bytes_of_their_tokens(stage: Stage) -> None:
    await stage.decode(step=2)
    answer = await stage.ask(chat(sampling=Sampling(logprobs=1)))
    logprobs = [entry for item in answer.items for entry in item.logprobs or ()]
    assert b"".join([entry.token for entry in logprobs]) == REPLY.encode()  # without the end token
    assert [entry.logprob for entry in logprobs] == [-i / 100 for i in SCRIPT[:-1]]
    assert logprobs[0].top == [(logprobs[0].token, logprobs[0].logprob)]


async def test_completions(stage: Stage) -> None:
    decode = await stage.decode()
    prompt = byte_level().encode("Once upon").ids
    for given in ("Once upon", prompt):
        request = Complete(model=MODEL, prompt=given, sampling=Sampling(), max_tokens=3, echo=True)
        answer = await stage.ask(request)
        assert answer.text == "Once upon" + byte_level().decode(SCRIPT[:3])
        assert decode.requests[-1].prompt == prompt
    silent = await stage.ask(
        Complete(model=MODEL, prompt="Once upon", sampling=Sampling(), max_tokens=3)
    )
    assert silent.text == byte_level().decode(SCRIPT[:3])
    nothing = await stage.ask(
        Complete(model=MODEL, prompt="Once", sampling=Sampling(), max_tokens=0, echo=True)
    )
    assert (nothing.text, nothing.end.status) == ("Once", "length")


# --------------------------------------------------------------------------------------------------------- token ids
async def test_the_ids_of_a_chat_are_those_that_decode_gets(stage: Stage) -> None:
    decode = await stage.decode()
    asked = chat(tools=[TOOL])
    await stage.ask(asked)
    expected = decode.requests[0].prompt
    found = await tokenize(stage.gateway, Tokenize(prompt=asked, pieces=True))
    assert found.ids == expected
    assert len(found.pieces) == len(expected)
    assert await count_tokens(stage.gateway, asked) == len(expected)
    text = await detokenize(stage.gateway, Detokenize(model=MODEL, ids=expected))
    assert text == byte_level().decode(expected, skip_special_tokens=False)
    assert len(decode.requests) == 1


@pytest.mark.parametrize("inline", [0, 1 << 24])
async def test_the_ids_of_a_raw_prompt(folder: Path, inline: int) -> None:
    """More of them than one item holds."""
    text = "naïve 👩‍🚀 " * 17000
    async with stage_in_memory(folder, inline_chars=inline, process_chars=1 << 24) as stage:
        prompt = Complete(model=MODEL, prompt=text, sampling=Sampling())
        found = await tokenize(stage.gateway, Tokenize(prompt=prompt))
        assert found.ids == byte_level().encode(text).ids
        assert found.pieces == []
        assert len(found.ids) > 1 << 15
        assert await detokenize(stage.gateway, Detokenize(model=MODEL, ids=found.ids)) == text


async def test_what_cannot_be_tokenized_is_named(stage: Stage) -> None:
    with pytest.raises(BadRequest) as caught:
        await detokenize(stage.gateway, Detokenize(model=MODEL, ids=[5, 10**9]))
    assert caught.value.param == "tokens"
    with pytest.raises(BadRequest) as caught:
        await count_tokens(stage.gateway, chat(messages=[]))
    assert caught.value.param == "messages"
    with pytest.raises(UnknownModel):
        await count_tokens(stage.gateway, chat(model="other"))


async def test_long_prompts_are_encoded_on_another_thread(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.decode()
    template = stage.tokenizer.vocabularies[MODEL].template
    threads, encode = [], template.encode

    def spy(*args: Any) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(*args)

    monkeypatch.setattr(template, "encode", spy)
    await stage.ask(chat("a"))
    with pytest.raises(ContextTooLong):
        await stage.ask(chat("a b " * 2000))
    assert threads == [True, False]


# ------------------------------------------------------------------------------------------------------- wrong requests
async def test_a_context_that_is_too_long_names_both_numbers(stage: Stage) -> None:
    await stage.decode(context=20)
    with pytest.raises(ContextTooLong) as raised:
        await stage.ask(chat("The red circle is left of the blue square. " * 2))
    assert re.findall(r"\d+", raised.value.message)[1:] == ["20"]
    assert raised.value.param == "messages"


async def test_a_caller_may_be_allowed_less_than_the_model_takes(stage: Stage) -> None:
    decode = await stage.decode(context=200)
    asked = msgspec.structs.replace(chat("The red circle. " * 2), max_tokens=None)
    with pytest.raises(ContextTooLong):
        await stage.ask(msgspec.structs.replace(asked, max_context=20))
    for most, room in ((100, 100), (1000, 200), (0, 200)):
        await stage.ask(msgspec.structs.replace(asked, max_context=most))
        request = decode.requests[-1]
        assert len(request.prompt) + request.sampling.max_tokens == room


@pytest.mark.parametrize(("request_", "error", "param"), [
    (chat(model="other"), UnknownModel, "model"),
    (chat(messages=[]), BadRequest, "messages"),
    (chat(sampling=Sampling(logit_bias={9999: 1.0})), BadRequest, "logit_bias"),
    (chat(sampling=Sampling(stop_token_ids=[-1])), BadRequest, "stop_token_ids"),
    (chat(max_tokens=-1), BadRequest, "max_tokens"),
    (Complete(model=MODEL, prompt=[1, 9999], sampling=Sampling()), BadRequest, "prompt"),
    (Complete(model=MODEL, prompt="", sampling=Sampling()), BadRequest, "prompt"),
    (chat(resume=Resume([9999], 1)), BadRequest, "resume.ids"),
])  # fmt: skip
async def test_what_is_wrong_is_named(
    stage: Stage, request_: Any, error: type[BadRequest], param: str
) -> None:
    await stage.decode()
    with pytest.raises(error) as caught:
        await stage.ask(request_)
    assert caught.value.param == param


def test_who_waits_can_be_told_in_json() -> None:
    """`$SRV.STATS` carries it."""
    counters = RequestCounters()
    counters.note_waiting("a model", 1)
    assert msgspec.json.decode(msgspec.json.encode(asdict(counters)))["waiting_by_model"] == {
        "a model": 1
    }
