"""Messages become the body of a chat: what is kept, and what is refused by which parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from motet_gateway.anthropic.chat_body import MAX_STOPS, chat_body
from motet_gateway.anthropic.schema import parse_messages
from motet_gateway.openai import schema as chat
from motet_shared.errors import BadRequest
from motet_shared.messages import ModelCard

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
