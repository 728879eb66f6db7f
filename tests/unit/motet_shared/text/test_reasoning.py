"""Formats of reasoning: replies as models write them, cut at every character, and their grammars."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.reasoning.reasoning_format import Beginning
from motet_shared.reasoning.registry import FORMATS, NAMES, TAGS, detect_format, find_format
from motet_shared.reasoning.think_tags import ThinkTags
from support.checkpoints import tiny_tokenizers
from support.families import chat_templates

OPTIONAL, OPEN, CLOSED = Beginning.OPTIONAL, Beginning.OPEN, Beginning.CLOSED
TAGGED = [one for one in FORMATS if isinstance(one, ThinkTags)]


@dataclass(frozen=True)
class Reply:
    """A reply as a model writes it. count: tokens of reasoning, if each character is a token.

    The tag of reasoning behind text counts from its last character on.
    """

    format: str
    beginning: Beginning
    text: str
    reasoning: str
    answer: str
    count: int = 0


def replies(tags: ThinkTags) -> list[Reply]:
    """Return replies that every format of tags can write."""
    opening, closing = tags.opening, tags.closing
    before, behind = tags.answer or ("", "")
    thought = f"{opening}\na < b, <th {{\n{closing}"
    answer = f"\n\n{before}An answer.\n  Two lines{behind}"
    rest = thought.removeprefix(opening)
    return [
        Reply(
            tags.name, OPTIONAL, thought + answer, "a < b, <th {", "An answer.\n  Two lines", len(thought)
        ),
        Reply(tags.name, OPEN, rest + answer, "a < b, <th {", "An answer.\n  Two lines", len(rest)),
        Reply(
            tags.name, OPEN, thought + answer, "a < b, <th {", "An answer.\n  Two lines", len(thought)
        ),
        Reply(tags.name, OPTIONAL, "No thought: <th", "", "No thought: <th"),
        Reply(tags.name, OPTIONAL, " \n", "", " \n"),
        Reply(tags.name, OPTIONAL, opening[:-1], "", opening[:-1]),
        Reply(tags.name, OPTIONAL, f"{opening}cut in", "cut in", "", len(opening) + 6),
        Reply(tags.name, OPEN, f"cut {closing[:-1]}", f"cut {closing[:-1]}", "", 3 + len(closing)),
        Reply(tags.name, OPTIONAL, f"{opening}{closing}Yes", "", "Yes", len(opening + closing)),
    ]  # fmt: skip


REPLIES = [
    *(reply for tags in TAGGED for reply in replies(tags)),
    Reply("think", OPTIONAL, "Use <think>x</think> here", "", "Use <think>x</think> here"),
    Reply("think", OPEN, "a</think>Use <think>x</think>", "a", "Use <think>x</think>", 9),
    Reply(
        "mistral", OPTIONAL, "[THINK]a[/THINK]b\n[THINK]c[/THINK]\nd [x", "ac", "bd [x", 26
    ),
    Reply("mistral", CLOSED, "b[THINK]c[/THINK]d", "c", "bd", 10),
    Reply(
        "kimi_k2",
        OPEN,
        "Hm. <|tool_calls\n<|tool_calls_section_begin|>x",
        "Hm. <|tool_calls",
        "<|tool_calls_section_begin|>x",
        45,
    ),
    Reply("granite", OPTIONAL, "<response>Yes</response>", "", "Yes"),
    Reply("granite", CLOSED, "\n<response>Yes</resp</response>\n", "", "Yes</resp\n"),
    Reply("granite", OPTIONAL, "<think>a</think>\nYes", "a", "Yes", 16),
]  # fmt: skip
CASES = [pytest.param(one, id=f"{one.format}-{number}") for number, one in enumerate(REPLIES)]


class Client:
    """Join what a parser emits, as a client does."""

    def __init__(self, name: str, beginning: Beginning):
        parser = find_format(name).parser(beginning)
        assert parser is not None
        self.parser = parser
        self.reasoning = self.text = ""

    def feed(self, text: str) -> Client:
        self._add(*self.parser.feed("", text))
        return self

    def flush(self) -> Client:
        self._add(*self.parser.flush(""))
        return self

    def _add(self, reasoning: str, text: str, tools: Any) -> None:
        assert tools is None
        self.reasoning += reasoning
        self.text += text


@pytest.mark.parametrize("reply", CASES)
def test_a_reply_is_divided_wherever_it_is_cut(reply: Reply) -> None:
    whole = Client(reply.format, reply.beginning).feed(reply.text).flush()
    assert (whole.reasoning, whole.text) == (reply.reasoning, reply.answer)
    each = Client(reply.format, reply.beginning)
    for end, character in enumerate(reply.text, start=1):
        each.feed(character)
        at_once = Client(reply.format, reply.beginning).feed(reply.text[:end])
        assert (each.reasoning, each.text) == (at_once.reasoning, at_once.text), reply.text[:end]
    each.flush()
    assert (each.reasoning, each.text) == (reply.reasoning, reply.answer)
    assert each.parser.reasoning_tokens == reply.count
    for at in range(len(reply.text)):
        two = Client(reply.format, reply.beginning)
        two.feed(reply.text[:at]).feed(reply.text[at:]).flush()
        assert (two.reasoning, two.text) == (reply.reasoning, reply.answer), at


@given(data=st.data())
def test_cuts_of_anything_do_not_matter(data: st.DataObject) -> None:
    tags = data.draw(st.sampled_from(TAGGED))
    beginning = data.draw(st.sampled_from([OPTIONAL, OPEN]))
    parts = st.sampled_from(
        [*tags.tags, "<", "</", "[", " ", "\n", "a", "<think", tags.closing[:3]]
    )
    text = "".join(data.draw(st.lists(parts, max_size=8)))
    each, whole = Client(tags.name, beginning), Client(tags.name, beginning)
    for end, character in enumerate(text, start=1):
        each.feed(character)
        at_once = Client(tags.name, beginning).feed(text[:end])
        assert (each.reasoning, each.text) == (at_once.reasoning, at_once.text), text[:end]
    each.flush()
    whole.feed(text).flush()
    assert (each.reasoning, each.text) == (whole.reasoning, whole.text)


def test_what_follows_reasoning_need_not_be_parsed() -> None:
    client = Client("think", OPTIONAL).feed("<think>a</think>")
    assert not client.parser.is_done
    client.feed("b")
    assert client.parser.is_done
    assert not Client("mistral", OPTIONAL).feed("b").parser.is_done
    assert find_format("think").parser(CLOSED) is None


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("think", ["<think>", "\n", "Hm.", "\n", "</think>", "\n", "\n", "An", " answer"]),
        ("think", ["<think>", "Hm.", "</think>", "\n\n", "", "An", " answer"]),
        ("granite", ["<think>", "Hm.", "</think>", "\n", "<response>", "An", " answer"]),
        ("mistral", ["An", "[THINK]", "Hm.", "[/THINK]", "\n", " answer"]),
    ],
)
def test_only_tokens_of_the_text_are_shown(name: str, tokens: list[str]) -> None:
    parser = find_format(name).parser(OPTIONAL)
    assert parser is not None
    shown = []
    for token in tokens:
        parser.feed("", token)
        if not parser.hides:
            shown.append(token)
    assert "".join(shown) == "An answer"


def test_a_token_without_text_of_its_own_is_shown() -> None:
    """As the first bytes of a character are, which its last byte completes."""
    parser = find_format("think").parser(OPEN)
    assert parser is not None
    parser.feed("", "Hm.</think>")
    parser.feed("", "")
    assert not parser.hides


@pytest.mark.parametrize(
    ("prompt", "beginning"),
    [
        ("assistant\n", OPTIONAL),
        ("assistant\n<think>\n", OPEN),
        ("assistant\n<think>\n\n</think>\n\n", CLOSED),
        ("What does <think> mean?", OPTIONAL),
        ("", OPTIONAL),
    ],
)
def test_a_prompt_tells_how_a_reply_begins(prompt: str, beginning: Beginning) -> None:
    assert find_format("think").beginning(prompt) is beginning


# ------------------------------------------------------------------------------------- grammars
@pytest.fixture(scope="module")
def spelling() -> Spelling:
    tokenizer = tiny_tokenizers.byte_level()
    return Spelling(tokenizer, tokenizer.get_vocab_size(), [tiny_tokenizers.EOS])


ANSWERS = [
    messages.Grammar(kind="json_schema", text='{"type": "object"}'),
    messages.Grammar(kind="regex", text=r'\{"a": \d\}'),
    messages.Grammar(kind="choice", text=json.dumps(['{"a": 1}'])),
    messages.Grammar(kind="grammar", text='start: thought\nthought: "{" LINES\nLINES: /[^}]*\\}/'),
    messages.Grammar(kind="grammar", text='root ::= "{" [^}]* "}"'),
]


def accepts(spelling: Spelling, grammar: messages.Grammar, text: str) -> bool:
    state = Grammar(grammar, spelling).start()
    ids = tiny_tokenizers.byte_level().encode(text, add_special_tokens=False).ids
    return state.accept(ids) and state.may_end


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: f"{one.kind}-{len(one.text)}")
@pytest.mark.parametrize("tags", TAGGED, ids=lambda one: one.name)
def test_a_grammar_begins_after_the_reasoning(
    tags: ThinkTags, answer: messages.Grammar, spelling: Spelling
) -> None:
    before, behind = tags.answer or ("", "")
    value = f'{before}{{"a": 1}}{behind}'
    thought = f"\nNot {{ yet: {tags.opening}, </th\n{tags.closing}"
    for beginning, head, unfinished in (
        (OPTIONAL, tags.opening + thought, tags.opening),
        (OPEN, thought, ""),
    ):
        grammar = _framed(answer, tags.frame(beginning))
        for between in ("", "\n", "\n\n"):
            assert accepts(spelling, grammar, head + between + value)
        assert not accepts(spelling, grammar, f"{head}\nNo {value}")
        assert not accepts(spelling, grammar, head)
        assert not accepts(spelling, grammar, f"{unfinished}{value}")
        assert accepts(spelling, grammar, value) == (beginning is OPTIONAL)
    closed = _framed(answer, tags.frame(CLOSED))
    assert accepts(spelling, closed, value)
    assert not accepts(spelling, closed, tags.opening + thought + value)


def test_a_reply_in_the_midst_of_its_reasoning_goes_on_in_its_grammar(spelling: Spelling) -> None:
    grammar = _framed(ANSWERS[0], find_format("think").frame(OPTIONAL))
    text = '<think>\nHm {"b"\n</think>\n\n{"a": 1}'
    ids = tiny_tokenizers.byte_level().encode(text, add_special_tokens=False).ids
    compiled = Grammar(grammar, spelling)
    for at in range(len(ids)):
        state = compiled.start(ids[:at])
        assert not state.may_end
        assert state.accept(ids[at:])
        assert state.may_end


def _framed(answer: messages.Grammar, frame: str) -> messages.Grammar:
    return messages.Grammar(kind=answer.kind, text=answer.text, param=answer.param, frame=frame)


# ------------------------------------------------------------------------------------- registry
def test_names_are_unique_and_tags_are_of_some_format() -> None:
    assert len(set(NAMES)) == len(FORMATS)
    assert {tag for one in FORMATS for tag in one.tags} == TAGS
    assert {one.format for one in REPLIES} <= set(NAMES)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "think"),
        ("harmony", "harmony"),
        ("deepseek", "think"),
        ("glm", "think"),
        ("chatml", None),
        ("llama3", None),
    ],
)
def test_a_template_tells_its_format(family: str, name: str | None) -> None:
    found = detect_format(chat_templates.family(family).template)
    assert (None if found is None else found.name) == name
