"""Write a reply's grammar as one text in llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


# What a grammar in Lark's syntax has besides names: texts, regular expressions, JSON schemas.
_PARTS = re.compile(r'(?P<text>"(?:[^"\\\n]|\\.)*")|/(?:[^/\\\n]|\\.)+/|(?P<json>%json\s*)(?={)')


def added_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of tokens such as `<tool_call>`, which a tokenizer has besides its pieces."""
    try:
        document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        found = {one["content"]: int(one["id"]) for one in document.get("added_tokens", [])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {text: number for text, number in found.items() if text[:1] == "<" and text[-1:] == ">"}


def with_token_ids(lark: str, ids: Mapping[str, int]) -> str:
    """Return a grammar that names tokens by id where its texts have their content.

    llguidance, as vLLM uses it, takes added tokens in angle brackets for special ones, which no text
    of a grammar matches.
    """
    if not any(text in lark for text in ids):
        return lark
    found, at = [], 0
    while (part := _PARTS.search(lark, at)) is not None:
        found.append(lark[at : part.start()])
        at = part.end()
        if part["json"]:
            _, at = json.JSONDecoder().raw_decode(lark, part.end())
        found.append(_as_tokens(part[0], ids) if part["text"] else lark[part.start() : at])
    return "".join(found) + lark[at:]


def _as_tokens(text: str, ids: Mapping[str, int]) -> str:
    """Return a quoted text as a sequence of texts and token ids."""
    pattern = "|".join(re.escape(one) for one in sorted(ids, key=len, reverse=True))
    parts = re.split(f"({pattern})", text[1:-1])
    if len(parts) == 1:
        return text
    named = [f"<[{ids[one]}]>" if one in ids else f'"{one}"' for one in parts if one]
    return " ".join(named) if len(named) == 1 else f"({' '.join(named)})"


def schema_of(grammar: Grammar) -> dict[str, Any]:
    """Return the schema of a grammar of the kind `json_schema`. Raises ValueError."""
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise ValueError("is no JSON schema, which is an object")
    return schema


def _schema(grammar: Grammar) -> str:
    return f"start: {json_rule(schema_of(grammar))}"


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
