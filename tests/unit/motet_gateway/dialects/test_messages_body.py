"""Messages become the body of a chat: what is kept, and what is refused by which parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from motet_gateway.anthropic.chat_body import MAX_STOPS, chat_body
from motet_gateway.anthropic.content import Content
from motet_gateway.anthropic.schema import parse_messages
from motet_gateway.openai import schema as chat
from motet_shared.errors import BadRequest
from motet_shared.messages import ModelCard, Text, ToolCallDelta

CALL = {"type": "tool_use", "id": "toolu_1", "name": "draw", "input": {"shape": "star"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}


def converted(*messages: dict[str, Any], card: ModelCard | None = None, **more: Any) -> Any:
    document = {"model": "m", "max_tokens": 9, "messages": list(messages)} | more
    return chat_body(parse_messages(json.dumps(document).encode()), card)[0]


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def test_blocks_become_messages_and_parts() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "a star"}
    document = {"type": "document", "source": source, "title": "notes"}
    hidden = {"type": "redacted_thinking", "data": "AAAA"}
    body = converted(user(document), assistant(hidden, CALL), user(RESULT))
    kinds = [type(message) for message in body.messages]
    assert kinds == [chat.UserMessage, chat.AssistantMessage, chat.ToolMessage]
    assert body.messages[0].content == [chat.TextPart(text="notes\n\na star")]
    assert body.messages[1].reasoning_content is None
    assert body.messages[2].tool_call_id == "toolu_1"


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([user()], {}, "messages[0].content"),
        ([user(RESULT)], {}, "messages[0].content[0].tool_use_id"),
        ([user({"type": "text", "text": "x"})], {"stop_sequences": [""]}, "stop_sequences"),
        (
            [user({"type": "text", "text": "x"})],
            {"stop_sequences": ["x"] * (MAX_STOPS + 1)},
            "stop_sequences",
        ),
        ([user({"type": "text", "text": "x"}), assistant(CALL)], {}, "messages[1].content"),
    ],
)
def test_refused(messages: list[dict[str, Any]], fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        converted(*messages, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "xhigh"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
    ],
)
def test_effort_of_models_whose_reasoning_has_a_switch(
    fields: dict[str, Any], effort: str | None
) -> None:
    said = user({"type": "text", "text": "x"})
    card = ModelCard(name="m", context=100, reasoning_switch=True)
    assert converted(said, card=card, **fields).reasoning_effort == effort
    assert converted(said, **fields).reasoning_effort is None


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"output_config": {"effort": "low"}}, "low"),
        ({"output_config": {"effort": "max"}}, "high"),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "disabled"}}, None),
    ],
)
def test_effort_of_models_that_always_reason(fields: dict[str, Any], effort: str | None) -> None:
    card = ModelCard(name="m", context=100, reasoning=True)
    assert converted(user({"type": "text", "text": "x"}), card=card, **fields).reasoning_effort == (
        effort
    )


def test_names_of_tools_may_have_128_characters() -> None:
    said = user({"type": "text", "text": "x"})
    tool: dict[str, Any] = {"name": "mcp__" + "x" * 123, "input_schema": {"type": "object"}}
    assert converted(said, tools=[tool]).tools[0].function.name == tool["name"]
    with pytest.raises(BadRequest) as caught:
        converted(said, tools=[tool | {"name": tool["name"] + "x"}])
    assert caught.value.param == "tools[0].name"


def test_the_end_of_a_call_and_the_text_behind_it_may_come_together() -> None:
    content = Content()
    content.add([Text("Now", [1], tools=[ToolCallDelta(0, "call_x", "draw")])])
    content.add([Text("", [1], tools=[ToolCallDelta(0, arguments='{"a": 1')])])
    content.add([Text(" Done", [2, 3], tools=[ToolCallDelta(0, arguments="}")])])
    content.finish()
    assert [block["type"] for block in content.blocks] == ["text", "tool_use", "text"]
    assert content.blocks[1] == CALL | {"id": "call_x", "input": {"a": 1}}
    assert content.take().count(b'"content_block_start"') == 3
