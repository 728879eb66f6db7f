"""Formats of tool calls: conversations as models write them, cut at every character."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared.messages import Chat, Sampling
from motet_shared.tool_formats.registry import FORMATS, NAMES, TAGS, detect_format, find_format
from motet_shared.tool_formats.tool import Tool
from motet_shared.tool_formats.tool_format import ToolFormat
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.tool_grammar import grammar_of
from support import chat_templates, tiny_tokenizers

SHAPE = {
    "type": "object",
    "properties": {
        "shape": {"type": "string", "enum": ["circle", "star"]},
        "label": {"type": "string"},
        "size": {"type": "integer"},
        "at": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["shape"],
}
TOOLS = [
    {"type": "function", "function": {"name": "draw", "parameters": SHAPE}},
    {"type": "function", "function": {"name": "stop"}},
]
FUNCTIONS = [Tool.of(tool) for tool in TOOLS]
LABEL = 'a "star" {[ <b> é\nsecond line'
Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Conversation:
    """A reply as a model writes it. valid: the grammar of the format accepts it."""

    format: str
    reply: str
    text: str
    calls: Calls = field(default_factory=list)
    valid: bool = True


def hermes(name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


STAR: dict[str, Any] = {"shape": "star", "label": LABEL, "size": 3, "at": [1, -2]}
CONVERSATIONS = [
    Conversation("hermes", hermes("draw", STAR), "", [("draw", STAR)]),
    Conversation(
        "hermes",
        f"I draw.\n{hermes('draw', {'shape': 'circle'})}\n{hermes('stop', {})}",
        "I draw.",
        [("draw", {"shape": "circle"}), ("stop", {})],
    ),
    Conversation("hermes", "No call: a < b, <tool, {}", "No call: a < b, <tool, {}"),
    Conversation(
        "hermes", "a\n<tool_call>\nno\n</tool_call> b", "a\n<tool_call>\nno\n</tool_call> b", [], False
    ),
]  # fmt: skip
CASES = [pytest.param(one, id=f"{one.format}-{number}") for number, one in enumerate(CONVERSATIONS)]


class Client:
    """Join what a parser emits, as a client does."""

    def __init__(self, tool_format: ToolFormat):
        self.parser = tool_format.parser("r", FUNCTIONS)
        self.text = ""
        self.calls: list[list[str]] = []

    def feed(self, text: str) -> None:
        self._add(*self.parser.feed(text))

    def flush(self) -> None:
        self._add(*self.parser.flush())

    def _add(self, text: str, deltas: Any) -> None:
        self.text += text
        for delta in deltas or ():
            if delta.id:
                assert delta.index == len(self.calls)
                self.calls.append([delta.id, delta.name, ""])
            assert delta.index == len(self.calls) - 1
            self.calls[-1][2] += delta.arguments

    @property
    def state(self) -> tuple[str, list[list[str]], int]:
        return self.text, [list(call) for call in self.calls], self.parser.calls


def assert_independent_of_cuts(tool_format: ToolFormat, text: str) -> None:
    """Compare what has come out after every prefix with that of the prefix at once."""
    client = Client(tool_format)
    for end, character in enumerate(text, start=1):
        client.feed(character)
        at_once = Client(tool_format)
        at_once.feed(text[:end])
        assert client.state == at_once.state, text[:end]
    client.flush()
    whole = Client(tool_format)
    whole.feed(text)
    whole.flush()
    assert client.state == whole.state


@pytest.mark.parametrize("case", CASES)
def test_a_conversation_is_parsed(case: Conversation) -> None:
    text, calls = find_format(case.format).parse(case.reply, FUNCTIONS)
    assert text == case.text
    assert [(name, json.loads(arguments)) for name, arguments in calls] == case.calls


@pytest.mark.parametrize("case", CASES)
def test_cuts_do_not_matter(case: Conversation) -> None:
    assert_independent_of_cuts(find_format(case.format), case.reply)


@pytest.mark.parametrize("case", CASES)
def test_two_pieces_give_what_one_gives(case: Conversation) -> None:
    tool_format = find_format(case.format)
    whole = Client(tool_format)
    whole.feed(case.reply)
    whole.flush()
    for at in range(len(case.reply)):
        client = Client(tool_format)
        client.feed(case.reply[:at])
        client.feed(case.reply[at:])
        client.flush()
        assert client.state == whole.state, at


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_cuts_of_anything_do_not_matter(name: str, data: st.DataObject) -> None:
    """Whatever a model puts together of the parts of its format, well-formed or not."""
    tool_format = find_format(name)
    replies = [one.reply for one in CONVERSATIONS if one.format == name]
    parts = st.sampled_from(
        [*tool_format.tags, tool_format.grammar.opening, *replies, "{", "}", "[", "]", '"', "\\", "\n", " ",
         ",", ";", "a", "draw", "<", '{"name": "draw", ', '"arguments": {"a": "b"}}', "{}"]
    )  # fmt: skip
    pieces = st.one_of(parts, st.sampled_from(replies).flatmap(_fragments))
    text = "".join(data.draw(st.lists(pieces, max_size=5)))
    assert_independent_of_cuts(tool_format, text)


def _fragments(reply: str) -> st.SearchStrategy[str]:
    bounds = st.tuples(st.integers(0, len(reply)), st.integers(0, len(reply)))
    return bounds.map(lambda two: reply[min(two) : max(two)])


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    tokenizer = tiny_tokenizers.byte_level()
    return Spelling(tokenizer, tokenizer.get_vocab_size(), [tiny_tokenizers.EOS])


def accepts(spelling: Spelling, tool_format: ToolFormat, reply: str, **fields: Any) -> bool:
    """Return True if the grammar of such a request accepts the whole reply."""
    request = Chat(model="m", messages=[], sampling=Sampling(), **fields)
    grammar = grammar_of(request, TOOLS, tool_format)
    assert grammar is not None
    state = Grammar(grammar, spelling).start()
    ids = tiny_tokenizers.byte_level().encode(reply, add_special_tokens=False).ids
    return state.accept(ids) and state.may_end


@pytest.mark.parametrize("case", CASES)
def test_the_grammar_accepts_valid_calls_only(case: Conversation, spelling: Spelling) -> None:
    tool_format, single = find_format(case.format), len(case.calls) < 2
    if single:
        accepted = accepts(spelling, tool_format, case.reply, parallel_tools=False)
        assert accepted == case.valid
    required = accepts(spelling, tool_format, case.reply, tool_choice="required")
    assert required == (case.valid and bool(case.calls) and not case.text)


@pytest.mark.parametrize("name", NAMES)
def test_a_required_call_has_the_named_tool_and_its_arguments(
    name: str, spelling: Spelling
) -> None:
    tool_format = find_format(name)
    case = next(one for one in CONVERSATIONS if one.format == name and one.calls and not one.text)
    assert case.calls[0][0] == "draw"
    only = {"tool_choice": "required", "tool": "draw"}
    assert accepts(spelling, tool_format, case.reply, **only)
    assert not accepts(spelling, tool_format, case.reply.replace("star", "moon"), **only)
    assert not accepts(spelling, tool_format, case.reply, tool_choice="required", tool="stop")


def test_names_are_unique_and_tags_are_of_some_format() -> None:
    assert len(set(NAMES)) == len(FORMATS)
    assert {tag for one in FORMATS for tag in one.tags} == TAGS
    assert {one.format for one in CONVERSATIONS} == set(NAMES)


@pytest.mark.parametrize(
    ("family", "name"),
    [("chatml", "hermes"), ("qwen3", "hermes"), ("gemma", "hermes")],
)
def test_a_template_tells_its_format(family: str, name: str) -> None:
    template = next(one.template for one in chat_templates.FAMILIES if one.name == family)
    assert detect_format(template).name == name


def test_the_setting_names_a_format() -> None:
    for name in ("auto", *NAMES):
        assert TokenizerConfig(model=("m=/m",), tool_format=name).tool_format == name
