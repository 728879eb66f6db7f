"""Write a reply's grammar as one text in llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json

from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Grammar
from motet_shared.text.grammars import json_rule

_ANSWER = "@answer"  # what a frame calls the text that it surrounds (`messages.Grammar.frame`)
_RULE = "framed_answer"


def as_lark(grammar: Grammar) -> str:
    """Return the grammar with its frame. Raises BadRequest for JSON that is none."""
    try:
        answer = {"json_schema": _schema, "regex": _regex, "choice": _choice, "grammar": _lark}[
            grammar.kind
        ](grammar)
    except ValueError as error:
        raise BadRequest(
            f"`{grammar.param or grammar.kind}`: {error}; correct it", param=grammar.param or None
        ) from None
    if not grammar.frame:
        return answer
    frame = grammar.frame.replace(_ANSWER, _RULE)
    return f"{frame}\n{_RULE}: %lark {{\n{answer}\n}}\n"


def _schema(grammar: Grammar) -> str:
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise ValueError("is no JSON schema, which is an object")
    return f"start: {json_rule(schema)}"


def _regex(grammar: Grammar) -> str:
    escaped = grammar.text.replace("/", r"\/")
    return f"start: /{escaped}/"


def _choice(grammar: Grammar) -> str:
    return "start: " + " | ".join(map(json.dumps, json.loads(grammar.text)))


def _lark(grammar: Grammar) -> str:
    if "::=" in grammar.text and grammar.frame:
        raise UnsupportedParameter(
            f"`{grammar.param or 'grammar'}`: GBNF behind reasoning is not supported by this engine;"
            " give Lark's syntax",
            param=grammar.param or None,
        )
    return grammar.text
