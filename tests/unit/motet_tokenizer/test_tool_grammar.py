"""What tools, `tool_choice` and `strict` make of a reply: written by the tokenizer, compiled by decode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Chat, Sampling
from motet_shared.tool_formats.hermes import HERMES, HermesParser
from motet_tokenizer.dialect import Dialect
from motet_tokenizer.tool_grammar import grammar_of
from support.checkpoints import tiny_tokenizers

SHAPE = {
    "type": "object",
    "properties": {"shape": {"enum": ["circle", "square"]}},
    "required": ["shape"],
}
ODD = {"type": "object", "properties": {"ids": {"type": "array", "uniqueItems": True}}}


def tool(name: str, parameters: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


DRAW, STOP, SORT = tool("draw", SHAPE), tool("stop"), tool("sort", ODD)
TOOLS = [DRAW, STOP, SORT]
CIRCLE = '<tool_call>\n{"name": "draw", "arguments": {"shape": "circle"}}\n</tool_call>'
MOON = CIRCLE.replace("circle", "moon")
HALT = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
SORTED = '<tool_call>\n{"name": "sort", "arguments": {"ids": [1, 1]}}\n</tool_call>'
OTHER = HALT.replace("stop", "other")


@pytest.fixture(scope="module")
def spelling() -> Spelling:
    tokenizer = tiny_tokenizers.byte_level()
    return Spelling(tokenizer, tokenizer.get_vocab_size(), [tiny_tokenizers.EOS])


def chat(**fields: Any) -> Chat:
    return Chat(model="m", messages=[], sampling=Sampling(), **fields)


def verdicts(spelling: Spelling, grammar: messages.Grammar | None, texts: list[str]) -> list[str]:
    """Of each text: "whole", "part" of something longer, or "no"."""
    assert grammar is not None
    compiled = Grammar(grammar, spelling)
    found = []
    for text in texts:
        sentence = compiled.start()
        taken = sentence.accept(
            tiny_tokenizers.byte_level().encode(text, add_special_tokens=False).ids
        )
        found.append("no" if not taken else "whole" if sentence.may_end else "part")
    return found


@pytest.mark.parametrize(
    ("wish", "tools", "whole", "no"),
    [
        (
            {"tool_choice": "required"},
            TOOLS,
            [CIRCLE, HALT, SORTED, f"{CIRCLE}\n{HALT}"],
            [
                "Hello",
                MOON,
                OTHER,
                f"Well: {CIRCLE}",
                f"{CIRCLE} done",
                HALT.replace("{}}", '{"a": 1}}'),
            ],
        ),
        (
            {"tool_choice": "required", "parallel_tools": False},
            TOOLS,
            [CIRCLE],
            [f"{CIRCLE}\n{HALT}"],
        ),
        ({"tool_choice": "required", "tool": "stop"}, TOOLS, [HALT], [CIRCLE, f"{HALT}\n{HALT}"]),
        (
            {},
            [tool("draw", SHAPE, strict=True), SORT],
            ["Hello <b>you</b>", CIRCLE, f"Well: {CIRCLE}\nand\n{SORTED} done", "a < b, <tool"],
            [MOON, f"Well: {MOON}", OTHER, f"{CIRCLE} and {MOON}"],
        ),
        (
            {"parallel_tools": False},
            TOOLS,
            ["Hello", f"Well: {CIRCLE}"],
            [f"{CIRCLE}\n{HALT}", MOON],
        ),
        (
            {
                "grammar": messages.Grammar(
                    kind="json_schema", text=json.dumps(SHAPE), param="response_format"
                )
            },
            TOOLS,
            ['{"shape": "square"}', CIRCLE, f"{CIRCLE}\n{HALT}"],
            ["Hello", '{"shape": "moon"}', MOON],
        ),
    ],
)
def test_what_a_reply_may_be(
    wish: dict[str, Any],
    tools: list[dict[str, Any]],
    whole: list[str],
    no: list[str],
    spelling: Spelling,
) -> None:
    grammar = grammar_of(chat(**wish), tools, Dialect(HERMES, None))
    assert verdicts(spelling, grammar, whole) == ["whole"] * len(whole)
    assert verdicts(spelling, grammar, no) == ["no"] * len(no)


def test_the_parser_reads_what_the_grammar_writes() -> None:
    parser = HermesParser("r")
    text, deltas = parser.feed(f"{CIRCLE}\n{HALT}")
    assert (text, parser.calls) == ("", 2)
    assert [delta.name for delta in deltas or [] if delta.name] == ["draw", "stop"]


def test_a_model_that_may_say_what_it_likes_has_no_grammar() -> None:
    assert grammar_of(chat(), TOOLS, Dialect(HERMES, None)) is None
    assert grammar_of(chat(), [], Dialect(HERMES, None)) is None
    shape = messages.Grammar(kind="regex", text="a")
    assert grammar_of(chat(grammar=shape), [], Dialect(HERMES, None)) is shape
    assert grammar_of(chat(tool_choice="none", grammar=shape), [], Dialect(HERMES, None)) is shape


@pytest.mark.parametrize(
    ("wish", "tools", "param"),
    [
        ({"tool_choice": "required"}, [], "tool_choice"),
        ({"tool_choice": "required", "tool": "paint"}, TOOLS, "tool_choice"),
        ({"grammar": messages.Grammar(kind="regex", text="a", param="structured_outputs.regex")}, TOOLS,
         "structured_outputs.regex"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(
    wish: dict[str, Any], tools: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        grammar_of(chat(**wish), tools, Dialect(HERMES, None))
    assert raised.value.param == param


def test_keywords_of_a_strict_tool_are_held_to_or_refused(spelling: Spelling) -> None:
    grammar = grammar_of(chat(), [tool("sort", ODD, strict=True)], Dialect(HERMES, None))
    assert grammar is not None
    with pytest.raises(UnsupportedParameter, match="uniqueItems") as raised:
        Grammar(grammar, spelling)
    assert raised.value.param == "tools"
