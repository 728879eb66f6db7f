"""Parts of /v1/responses: custom inputs as they arrive, encoded reasoning, and the names of parameters."""

from __future__ import annotations

import base64
import json
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_gateway.responses.chat_request import names_of
from motet_gateway.responses.items import ReasoningItem, ReasoningText, SummaryText
from motet_gateway.responses.output.custom_input import CustomInput
from motet_gateway.responses.output.output import Output
from motet_gateway.responses.reasoning import encoded, reasoning_of
from motet_shared.errors import BadRequest
from motet_shared.messages import Text, ToolCallDelta


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges)]


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
    st.sampled_from(["", " ", "\n  "]),
)
def test_an_input_is_the_same_however_its_call_is_cut(
    text: str, places: list[int], ascii_only: bool, space: str
) -> None:
    inner = json.dumps(text, ensure_ascii=ascii_only)
    found = CustomInput()
    pieces = [
        found.feed(piece) for piece in cut(f'{space}{{{space}"input":{space}{inner}}}', places)
    ]
    assert found.finish() == ""
    assert "".join(pieces) == found.text == text


@given(st.text(max_size=40), st.lists(st.integers(0, 100), max_size=4))
def test_anything_else_is_taken_as_it_stands(text: str, places: list[int]) -> None:
    found = CustomInput()
    seen = "".join([found.feed(piece) for piece in cut(text, places)]) + found.finish()
    assert seen == found.text
    if not text.lstrip().startswith('{"input"'):
        try:
            held = json.loads(text)["input"]
        except (ValueError, LookupError, TypeError):
            held = text
        assert found.text == (held if isinstance(held, str) else text)


@pytest.mark.parametrize("broken", ["\\u00", "\\ud83d", "\\ud83d\\n", "\\uZZZZ", "\\x", "\\"])
def test_broken_escapes_end_nothing(broken: str) -> None:
    found = CustomInput()
    found.feed(f'{{"input": "a{broken}')
    found.finish()
    assert found.text.startswith("a")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_reasoning_comes_back(text: str) -> None:
    assert reasoning_of(ReasoningItem(encrypted_content=encoded(text)), "input[0]") == text
    item = ReasoningItem(content=[ReasoningText(text=text)], encrypted_content="foreign")
    assert reasoning_of(item, "input[0]") == text
    assert reasoning_of(ReasoningItem(summary=[SummaryText(text=text)]), "input[0]") == text


def test_reasoning_that_unpacks_to_very_much_is_refused() -> None:
    bomb = "motet1." + base64.b64encode(zlib.compress(bytes(64 << 20))).decode()
    for content in (bomb, "motet1.%%%", "motet1.AAAA", "gAAAAB", bomb[:-40]):
        with pytest.raises(BadRequest) as refusal:
            reasoning_of(ReasoningItem(encrypted_content=content), "input[3]")
        assert refusal.value.param == "input[3].encrypted_content"


@pytest.mark.parametrize(
    ("chat", "response"),
    [
        ("messages[1].content[0].image_url.url", "input[4].content[0].image_url"),
        ("messages[0]", "instructions"),
        ("messages[7].content", "input.content"),
        ("messages", "input"),
        ("tools[2].function.parameters", "tools[2].parameters"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("model", "model"),
    ],
)
def test_parameters_of_a_chat_have_the_names_of_a_response(chat: str, response: str) -> None:
    renamed = names_of(("instructions", "input[4]")).rename(chat)
    assert renamed == response


@pytest.mark.parametrize("custom", [False, True])
def test_the_end_of_a_call_and_the_text_behind_it_may_come_together(custom: bool) -> None:
    output = Output("resp_1", custom=frozenset({"draw"} if custom else ()))
    key = "input" if custom else "a"
    output.add([Text("", [1], tools=[ToolCallDelta(0, "call_x", "draw")])])
    output.add([Text("", [1], tools=[ToolCallDelta(0, arguments=f'{{"{key}": "1"')])])
    output.add([Text("Done", [2, 3], tools=[ToolCallDelta(0, arguments="}")])])
    output.finish()
    kind = "custom_tool_call" if custom else "function_call"
    assert [item["type"] for item in output.items] == [kind, "message"]
    assert output.items[0]["name"] == "draw"
    if custom:
        assert output.items[0]["input"] == "1"
    else:
        assert json.loads(output.items[0]["arguments"]) == {"a": "1"}
