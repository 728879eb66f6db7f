"""Anthropic's client for Python."""

from __future__ import annotations

from typing import Any

import anthropic
from cases import ANSWER, KEY, MODEL, QUESTION, TOOL_SCHEMA, URL, WISH, case, main

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
TOOL: Any = {"name": "draw", "description": "Draw a picture.", "input_schema": TOOL_SCHEMA}


@case
def message() -> None:
    made = client.messages.create(model=MODEL, max_tokens=60, messages=ASK, extra_body=GREEDY)
    assert made.content[0].type == "text"
    assert ANSWER in made.content[0].text


@case
def message_streamed() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=60, messages=ASK, extra_body=GREEDY
    ) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    assert ANSWER in text


@case
def tool_use_and_its_result() -> None:
    wish: list[Any] = [{"role": "user", "content": WISH}]
    options: Any = {"model": MODEL, "max_tokens": 80, "extra_body": GREEDY, "tools": [TOOL]}
    made = client.messages.create(messages=wish, **options)
    assert made.stop_reason == "tool_use"
    (call,) = [block for block in made.content if block.type == "tool_use"]
    assert "circle" in call.input["prompt"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "{}"}
    more = [*wish, {"role": "assistant", "content": made.content}]
    more.append({"role": "user", "content": [result]})
    assert client.messages.create(messages=more, **options).stop_reason


@case
def count_tokens() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 5


@case
def prefill() -> None:
    begun: Any = {"role": "assistant", "content": "I see"}
    made = client.messages.create(model=MODEL, max_tokens=20, messages=[*ASK, begun])
    assert made.content


@case
def cancel() -> None:
    with client.messages.stream(model=MODEL, max_tokens=400, messages=ASK) as stream:
        next(iter(stream.text_stream))


@case
def errors() -> None:
    try:
        client.messages.create(model="no-such-model", max_tokens=5, messages=ASK)
    except anthropic.NotFoundError:
        return
    raise AssertionError("an unknown model was accepted")


main("anthropic")
