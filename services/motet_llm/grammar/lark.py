"""Translate a client's output constraint into llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json

from llguidance import regex_to_lark

from motet_shared import messages
from motet_shared.errors import BadRequest
from motet_shared.text.grammars import LONGEST, json_rule

from .gbnf import gbnf_to_lark
from .levels import MOST_LEVELS, count_levels
from .termination import lark_ends

_MAX_SHOWN = 60
# The model spells forced text itself. Otherwise llguidance looks ahead for all of it, which may
# be a million characters.
_OPTIONS = '%llguidance {"no_forcing": true}'


def lark(constraint: messages.Grammar) -> str:
    """Return the grammar of a constraint.

    Raises BadRequest for an invalid schema, expression, list or grammar, and for one that is too
    long, has too many levels or cannot end.
    """
    if len(constraint.text) > LONGEST:
        raise BadRequest(
            f"{describe(constraint)}: has {len(constraint.text)} characters; give at most {LONGEST}",
            param=constraint.param or None,
        )
    try:
        text = {"json_schema": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar}[
            constraint.kind
        ](constraint.text)
        _check_levels(text)
        endless = not lark_ends(text)
    except ValueError as error:
        raise BadRequest(
            f"{describe(constraint)}: {error}; correct it", param=constraint.param or None
        ) from None
    except RecursionError:
        raise BadRequest(
            f"{describe(constraint)}: is nested too deeply; flatten it",
            param=constraint.param or None,
        ) from None
    if endless:
        message = f"{describe(constraint)}: no text that satisfies it ever ends; give its recursion an end"
        raise BadRequest(message, param=constraint.param or None)
    answer = f"{text}\n{_OPTIONS}\n"
    return _framed(constraint.frame, answer) if constraint.frame else answer


def _check_levels(text: str) -> None:
    """Raise ValueError for a grammar that the compiler might recurse into too deeply."""
    if (levels := count_levels(text)) > MOST_LEVELS:
        raise ValueError(f"may be {levels} levels deep; at most {MOST_LEVELS} are allowed")


def _framed(frame: str, answer: str) -> str:
    """Return a frame and the grammar of the answer in it, which share no names of rules."""
    parts = [
        {"lark_grammar": f"{frame}\n{_OPTIONS}\n"},
        {"name": "answer", "lark_grammar": answer},
    ]
    return json.dumps({"grammars": parts})


def describe(constraint: messages.Grammar) -> str:
    """Return the name of the field and its value, shortened for error messages."""
    text = (
        constraint.text
        if len(constraint.text) <= _MAX_SHOWN
        else constraint.text[: _MAX_SHOWN - 3] + "..."
    )
    return f"`{constraint.param or constraint.kind}` {text}"


def _schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("is no JSON schema, which is an object")
    return f"start: {json_rule(schema)}"


def _regex(text: str) -> str:
    r"""Return the rule of a regular expression; `\d` matches ASCII digits only.

    That is what most authors mean by it; the other classes are Unicode's.
    """
    if not text:
        raise ValueError("is empty")
    return f"start: /{regex_to_lark(text, 'd')}/"


def _choice(text: str) -> str:
    choices = json.loads(text)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) for choice in choices)
    ):
        raise ValueError("is no list of texts with one at least")
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))


def _grammar(text: str) -> str:
    """Return Lark's syntax as it is, and llama.cpp's (GBNF) translated."""
    if not text.strip():
        raise ValueError("is empty")
    return gbnf_to_lark(text) if "::=" in text else text
