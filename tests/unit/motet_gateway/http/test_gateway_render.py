"""The pre-rendered events are what the official package's types say they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from motet_gateway.http.problems import Problem
from motet_gateway.openai.render import DONE, ChatChunks, CompletionChunks, error_event
from motet_gateway.openai.results import Collected, add_usage, chat_result, completion_result
from motet_shared.errors import Overloaded, WorkerLost
from motet_shared.messages import End, Text, TextLogprob, ToolCallDelta, Usage

HEAD = ("id-1", 1_750_000_000, 'model "x"')
USAGE = Usage(prompt_tokens=10, completion_tokens=4, cached_tokens=6, reasoning_tokens=1)
TIMING = {"gateway.total": 0.25, "decode.decode": 0.2}
LOGPROBS = [
    TextLogprob(b"caf\xc3", -0.5, [(b"caf\xc3", -0.5), (b"x", -2.0)]),
    TextLogprob(b"\xa9", -0.1),
]


def events(data: bytes) -> list[Any]:
    lines = data.decode().split("\n\n")
    assert lines.pop() == "", "every event ends with an empty line"
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def chat_events(data: bytes) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate(event, strict=True) for event in events(data)]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_any_text_survives(texts: list[str]) -> None:
    choice = ChatChunks(*HEAD).choice(2)
    chunks = chat_events(choice.batch([Text(text, [1]) for text in texts]))
    assert [chunk.choices[0].delta.content for chunk in chunks] == texts
    assert {(chunk.id, chunk.model, chunk.choices[0].index) for chunk in chunks} == {
        ("id-1", 'model "x"', 2)
    }
    plain = events(CompletionChunks(*HEAD).choice(0).batch([Text(text, [1]) for text in texts]))
    assert [Completion.model_validate({**e, "choices": []}).id for e in plain] == ["id-1"] * len(
        texts
    )
    assert [event["choices"][0]["text"] for event in plain] == texts


def test_an_event_has_exactly_the_documented_fields() -> None:
    (event,) = events(ChatChunks(*HEAD).choice(0).batch([Text("hi", [1])]))
    assert event == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 1_750_000_000,
        "model": 'model "x"',
        "choices": [
            {"index": 0, "delta": {"content": "hi"}, "logprobs": None, "finish_reason": None}
        ],
    }


def test_items_without_text_say_nothing() -> None:
    assert ChatChunks(*HEAD).choice(0).batch([Text("", [1]), Text("", [2])]) == b""


def test_usage_is_null_until_the_last_chunk_and_absent_unless_asked_for() -> None:
    chunks = ChatChunks(*HEAD, include_usage=True)
    choice = chunks.choice(0)
    body = (
        choice.start()
        + choice.batch([Text("hi", [1])])
        + choice.finish(End(0, 1))
        + chunks.usage(USAGE, TIMING)
    )
    parsed = events(body)
    assert [event["usage"] for event in parsed[:-1]] == [None] * 3
    last = ChatCompletionChunk.model_validate(parsed[-1], strict=True)
    assert (last.choices, last.usage and last.usage.total_tokens) == ([], 14)
    assert parsed[-1]["timing"] == TIMING
    silent = ChatChunks(*HEAD)
    assert silent.usage(USAGE, TIMING) == b""
    assert "usage" not in events(silent.choice(0).start())[0]


def test_the_first_chunk_names_the_role_and_the_last_the_reason() -> None:
    choice = ChatChunks(*HEAD).choice(0)
    first, last = chat_events(choice.start() + choice.finish(End(0, 0, "length")))
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)


def test_tool_calls_are_streamed_in_pieces() -> None:
    choice = ChatChunks(*HEAD).choice(0)
    pieces = [
        Text("Sure. ", [1], [ToolCallDelta(0, "call_1", "draw", "")]),
        Text("", [2], [ToolCallDelta(0, arguments='{"prompt":')]),
        Text(
            "", [3], [ToolCallDelta(0, arguments='"x"}'), ToolCallDelta(1, "call_2", "draw", "{}")]
        ),
    ]
    chunks = chat_events(choice.batch(pieces) + choice.finish(End(0, 3)))
    assert chunks[0].choices[0].delta.content == "Sure. "
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.id, call.type) for call in calls] == [
        (0, "call_1", "function"),
        (0, None, None),
        (0, None, None),
        (1, "call_2", "function"),
    ]
    arguments = [
        call.function.arguments or "" for call in calls if call.index == 0 and call.function
    ]
    assert json.loads("".join(arguments)) == {"prompt": "x"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_logprobs_of_half_a_character() -> None:
    (chunk,) = chat_events(
        ChatChunks(*HEAD).choice(0).batch([Text("café", [1, 2], None, LOGPROBS)])
    )
    logprobs = chunk.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content) == "café".encode()
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -2.0]
    choice = CompletionChunks(*HEAD).choice(0)
    first, second = (
        events(choice.batch([Text("ab", [1], None, [TextLogprob(b"ab", -1.0)])]))[0]
        for _ in range(2)
    )
    assert first["choices"][0]["logprobs"]["text_offset"] == [0]
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


def test_whole_bodies() -> None:
    choice = Collected()
    choice.add([Text("ca", [1], None, LOGPROBS[:1]), Text("fé", [2], None, LOGPROBS[1:])])
    choice.end = End(0, 2, "length", USAGE)
    chat = ChatCompletion.model_validate_json(chat_result(*HEAD, [choice], USAGE), strict=True)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("café", "length")
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert (chat.usage.total_tokens, chat.usage.prompt_tokens_details.cached_tokens) == (14, 6)
    plain = Completion.model_validate_json(completion_result(*HEAD, [choice], USAGE), strict=True)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.token_logprobs == [-0.5, -0.1]


def test_a_whole_body_with_tool_calls() -> None:
    choice = Collected()
    choice.add(
        [
            Text("", [1], [ToolCallDelta(0, "c", "draw", "{")]),
            Text("", [2], [ToolCallDelta(0, arguments="}")]),
        ]
    )
    choice.end = End(0, 2)
    chat = ChatCompletion.model_validate_json(chat_result(*HEAD, [choice], USAGE), strict=True)
    message = chat.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    assert message.tool_calls[0].to_dict() == {
        "id": "c",
        "type": "function",
        "function": {"name": "draw", "arguments": "{}"},
    }
    assert chat.choices[0].finish_reason == "tool_calls"


def test_usage_counts_a_shared_prompt_once() -> None:
    ends: list[End | None] = [End(0, 1, "stop", USAGE)] * 4
    assert add_usage(ends).prompt_tokens == 10
    assert add_usage(ends, prompts=2).prompt_tokens == 20
    assert add_usage(ends, prompts=2).completion_tokens == 16


def test_guessed_tokens_are_told_where_there_were_any() -> None:
    ends: list[End | None] = [End(0, 1, "stop", Usage(10, 4, accepted_tokens=3))] * 2
    choice = Collected()
    choice.end = ends[0]
    body = chat_result(*HEAD, [choice], add_usage(ends))
    usage = ChatCompletion.model_validate_json(body, strict=True).usage
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 0)
    assert b"prediction" not in chat_result(*HEAD, [choice], USAGE)


@pytest.mark.parametrize(
    ("error", "code"), [(Overloaded("full"), "overloaded"), (WorkerLost("gone"), "worker_lost")]
)
def test_errors_within_a_stream(error: Exception, code: str) -> None:
    (event,) = events(error_event(Problem.of(error)))
    assert set(event) == {"error"}
    assert set(event["error"]) == {"message", "type", "param", "code"}
    assert event["error"]["code"] == code
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("continuous", [False, True])
def test_reasoning_comes_before_the_text_in_fields_of_its_own(continuous: bool) -> None:
    items = [
        Text("", [1], reasoning="Hm"),
        Text("", [2]),
        Text("Yes", [3], reasoning=", so"),
        Text(".", [4], logprobs=LOGPROBS[1:]),
    ]
    chunks = ChatChunks(*HEAD, include_usage=continuous, continuous=continuous)
    deltas = [event["choices"][0]["delta"] for event in events(chunks.choice(0).batch(items))]
    if continuous:
        assert deltas.pop(0)["role"] == "assistant"
    assert deltas == [
        {"reasoning_content": "Hm"},
        {"reasoning_content": ", so"},
        {"content": "Yes"},
        {"content": "."},
    ]
    collected = Collected(end=End(0, 4))
    collected.add(items)
    message = json.loads(chat_result(*HEAD, [collected], USAGE))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, so", "Yes.")
