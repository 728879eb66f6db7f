"""The streaming parser of tool calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_shared.messages import ToolCallDelta
from motet_shared.tool_formats.hermes import CLOSING as CLOSE
from motet_shared.tool_formats.hermes import OPENING as OPEN
from motet_shared.tool_formats.hermes import HermesParser as ToolParser
from motet_shared.tool_formats.parser import call_id

CALL = '<tool_call>\n{"name": "draw", "arguments": {"shape": "a \\"star\\" {[", "at": [1, {"x": 2}]}}\n</tool_call>'
ARGUMENTS = '{"shape": "a \\"star\\" {[", "at": [1, {"x": 2}]}'

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.text("abc_ä-", min_size=1, max_size=8)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
PROSE = st.text('ab <>/{}"\n', max_size=12).filter(lambda text: OPEN not in text)
# Everything that a model might put together, well-formed or not.
SHREDS = st.lists(
    st.sampled_from([
        OPEN, CLOSE, OPEN[:5], CLOSE[:7], '{"name": "draw", "arguments": ', '{"a": "b"}', "{", "}", "[", "]", '"', "\\",
        "\n", " ", ",", "text", "<", '{"arguments": {"a": 1}, "name": "x"}', '"id": 1', CALL,
    ]),
    max_size=12,
).map("".join)  # fmt: skip


class Reply:
    """Everything that a parser has said, joined as a client joins it."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[ToolCallDelta] = []

    def add(self, piece: tuple[str, list[ToolCallDelta] | None]) -> None:
        text, deltas = piece
        self.text += text
        for delta in deltas or ():
            if delta.index == len(self.calls):
                assert delta.id
                assert delta.name
                self.calls.append(ToolCallDelta(delta.index, delta.id, delta.name, delta.arguments))
            else:
                assert delta.index == len(self.calls) - 1
                assert (delta.id, delta.name) == ("", "")
                self.calls[-1].arguments += delta.arguments

    def state(self) -> tuple[str, list[tuple[str, str, str]]]:
        return self.text, [(call.id, call.name, call.arguments) for call in self.calls]


def parse(chunks: list[str]) -> Reply:
    parser, reply = ToolParser("r"), Reply()
    for chunk in chunks:
        reply.add(parser.feed(chunk))
    reply.add(parser.flush())
    return reply


def chunks_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_and_several_calls(size: int) -> None:
    reply = parse(chunks_of(f"I draw.\n{CALL}\n{CALL}\n", size))
    assert reply.text == "I draw."
    assert [(call.name, call.arguments) for call in reply.calls] == [("draw", ARGUMENTS)] * 2
    assert json.loads(reply.calls[0].arguments)["at"] == [1, {"x": 2}]
    assert [call.id for call in reply.calls] == [call_id("r", 0), call_id("r", 1)]


def test_arguments_stream_as_they_come() -> None:
    parser = ToolParser("r")
    assert parser.feed('<tool_call>\n{"name": "draw", "arguments": ') == ("", None)
    assert parser.feed("{") == (
        "",
        [ToolCallDelta(0, call_id("r", 0), "draw"), ToolCallDelta(0, arguments="{")],
    )
    assert parser.feed('"shape": "a long sto') == (
        "",
        [ToolCallDelta(0, arguments='"shape": "a long sto')],
    )
    assert parser.calls == 0
    assert parser.feed('ry"}')[1] == [ToolCallDelta(0, arguments='ry"}')]
    assert parser.calls == 1


@given(SHREDS)
def test_what_has_come_out_depends_on_the_text_alone(text: str) -> None:
    """After every prefix, not only at the end: a client may lose its stream anywhere."""
    parser, reply = ToolParser("r"), Reply()
    for end, char in enumerate(text, start=1):
        reply.add(parser.feed(char))
        at_once = Reply()
        at_once.add(ToolParser("r").feed(text[:end]))
        assert reply.state() == at_once.state()
    reply.add(parser.flush())
    assert reply.state() == parse([text]).state()


@given(PROSE, st.lists(st.tuples(NAMES, OBJECTS), max_size=3), st.integers(1, 9))
def test_well_formed_calls_are_read(before: str, calls: list[tuple[str, dict]], size: int) -> None:
    bodies = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    text = before + "".join([f"\n{OPEN}\n{body}\n{CLOSE}" for body in bodies])
    reply = parse(chunks_of(text, size))
    assert reply.text == (before.rstrip() if calls else before)
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls


@given(PROSE, SHREDS)
def test_no_half_tag_is_sent_before_it_is_clear(before: str, after: str) -> None:
    parser, sent = ToolParser("r"), ""
    for char in before + OPEN:
        sent += parser.feed(char)[0]
    assert sent == before.rstrip()
    parse([before + OPEN + after])  # whatever follows, it is read to the end


@pytest.mark.parametrize("text", [
    "no call at all <tool> <b>",
    " leading and trailing space \n",
    "a\n<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>["draw"]</tool_call> more',
    '<tool_call>{"name": "draw", "argu',
    "half a tag <tool_ca",
    '<tool_call>{"name": "a</tool_call>b", "arguments": {}}',
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_what_is_no_call_stays_text(text: str, size: int) -> None:
    reply = parse(chunks_of(text, size))
    assert reply.text == text
    assert reply.calls == []


@pytest.mark.parametrize(("body", "name", "arguments"), [
    ('{"arguments": {"a": 1}, "name": "x"}', "x", {"a": 1}),
    ('{"name": "x", "arguments": "{\\"a\\": 1}"}', "x", {"a": 1}),
    ('{"name": "x"}', "x", {}),
    ('{"name": "x", "arguments": null}', "x", {}),
    ('{"name": "x\\u0041", "arguments": {"a": "</b>"}}', "xA", {"a": "</b>"}),
    ('{"name": "x", "arguments": {"a": 1}, "id": "7"}', "x", {"a": 1}),
])  # fmt: skip
@pytest.mark.parametrize("close", [CLOSE, ""])
def test_unusual_calls(body: str, name: str, arguments: dict, close: str) -> None:
    reply = parse(chunks_of(f"<tool_call>{body}{close}", 3))
    assert reply.text == ""
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [(name, arguments)]


def test_a_closing_tag_ends_arguments_that_do_not() -> None:
    reply = parse(
        chunks_of('<tool_call>{"name": "x", "arguments": {"a": 1</tool_call>\nand text', 2)
    )
    assert reply.text == "and text"
    assert reply.calls[0].arguments == '{"a": 1'


def test_text_after_a_call_without_closing_tag() -> None:
    reply = parse(chunks_of('<tool_call>{"name": "x", "arguments": {}}\nDone.', 2))
    assert (reply.text, reply.calls[0].arguments) == ("Done.", "{}")


def test_ids_are_the_same_in_every_process() -> None:
    assert call_id("req-1", 0) == "call_e80c71a2545d7b892841318e"
    assert len({call_id("req-1", 0), call_id("req-1", 1), call_id("req-2", 0)}) == 3


def test_a_lone_surrogate_stays_an_escape() -> None:
    """UTF-8 has no bytes for it; the frame of the reply must be encoded all the same."""
    parser, reply = ToolParser("request"), Reply()
    body = '{"arguments": {"a": "\\ud800 ä"}, "name": "f\\udc00"}'
    reply.add(parser.feed(f"{OPEN}{body}{CLOSE}"))
    reply.add(parser.flush())
    (call,) = reply.calls
    call.name.encode()
    call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud800 ä"}
