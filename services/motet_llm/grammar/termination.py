"""Decide whether any text that a grammar describes comes to an end.

A rule ends if one of its alternatives does, and an alternative if all of its parts do; a rule that
refers only to itself never does. The least set of rules of which this is true is found by iterating
until nothing is added. Syntax that is not understood is taken to end: the compiler reports what is
wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

Name = TypeVar("Name")

_MOST_EVALUATIONS = 100_000  # of parts of a schema, about 0.2 s
_PASSES = 64  # over all rules; what is undecided after them is taken to end


def _fixpoint(
    names: Callable[[], Iterable[Name]], ends: Callable[[Name, set[Name]], bool], wanted: Name
) -> bool:
    """Return True if `wanted` is in the least fixed point of `ends`; `names` may grow meanwhile."""
    known: set[Name] = set()
    for _ in range(_PASSES):
        before = len(known)
        known |= {name for name in list(names()) if name not in known and ends(name, known)}
        if wanted in known:
            return True
        if len(known) == before:
            return False
    return True


# ------------------------------------------------------------------------------------------------------- JSON schemas
def schema_ends(schema: Any, left: Iterator[int] | None = None) -> bool:
    """Return True if some finite JSON value satisfies the schema, as far as its references tell.

    A schema that takes more evaluations than `left` has items is taken to end: they would hold the
    process, which other requests share. None: _MOST_EVALUATIONS.
    """
    references = {"#": schema}
    remaining = iter(range(_MOST_EVALUATIONS)) if left is None else left

    def ends(pointer: str, known: set[str]) -> bool:
        return _Schema(references, schema, known, remaining).ends(references[pointer])

    size = -1
    try:
        while size < len(references):  # a pass may find references that were not known before
            size = len(references)
            found = _fixpoint(lambda: references, ends, "#")
    except _TooLargeError:
        return True
    return found


class _TooLargeError(Exception):
    """Signal that a schema takes too many evaluations."""


class _Schema:
    """Evaluate a schema once; references that end are given in `known`.

    References that are found are added to `references`. left: an item for each evaluation.
    """

    def __init__(self, references: dict[str, Any], root: Any, known: set[str], left: Iterator[int]):
        self._references, self._left = references, left
        self._root = root
        self._known = known

    def ends(self, schema: Any) -> bool:
        if next(self._left, None) is None:
            raise _TooLargeError
        if not isinstance(schema, dict):
            return schema is not False
        if not self._reference_ends(schema.get("$ref")):
            return False
        if not all(self.ends(part) for part in _list(schema.get("allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            parts = _list(schema.get(key))
            if parts and not any([self.ends(part) for part in parts]):
                return False
        if "const" in schema or "enum" in schema:
            return True
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else _list(kinds)
        return not kinds or any(self._kind_ends(schema, kind) for kind in kinds)

    def _reference_ends(self, pointer: Any) -> bool:
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            return True
        if pointer not in self._references:
            self._references[pointer] = _resolve(self._root, pointer)
        return pointer in self._known

    def _kind_ends(self, schema: dict[str, Any], kind: Any) -> bool:
        if kind == "object":
            listed = schema.get("properties")
            properties = listed if isinstance(listed, dict) else {}
            other = (
                True if "patternProperties" in schema else schema.get("additionalProperties", True)
            )
            names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
            return all(self.ends(properties.get(name, other)) for name in names)
        if kind == "array":
            count = schema.get("minItems")
            first = _list(schema.get("prefixItems"))
            least = count if isinstance(count, int) else 0
            return all(map(self.ends, first[:least])) and (
                least <= len(first) or self.ends(schema.get("items", True))
            )
        return True


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(root: Any, pointer: str) -> Any:
    """Return what a reference within the document points to.

    True, which anything satisfies, if it points to nothing.
    """
    if pointer[1:2] not in ("", "/"):  # an anchor
        return True
    found = root
    for step in pointer[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found


# ---------------------------------------------------------------------------------------------------------------- Lark
# A grammar may be long: no alternative may try many ways to read the same characters.
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*|->\s*\w+|\.\.|%(?:ignore|import|declare|override)\b[^\n]*)
      | (?P<literal>"(?:\\.|[^"\\])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>|@[\w-]+)
      | (?P<embedded>%json|%regex|%llguidance)\s*+
      | (?P<count>\{\s*+(?P<least>\d*+)\s*+(?:,\s*+\d*+\s*+)?\}
          |~\s*+(?P<from>\d++)(?:\s*+\.\.\s*+\d++)?)
      | (?P<name>[?!]?[A-Za-z_][\w-]*)(?P<head>(?:\[[^\[\]]*+\])?(?:\.-?\d++)?\s*+:(?!:))?
      | (?P<mark>[|&~()\[\]?*+])""",
    re.VERBOSE,
)
Rule = (
    bool | str | tuple[str, list["Rule"]]
)  # decided; the name of another rule; ("any" or "all", parts)


def lark_ends(text: str) -> bool:
    """Return True if some finite text satisfies the rule `start`."""
    try:
        rules = _Lark(text).rules()
    except _UnsupportedSyntax:
        return True

    def ends(name: str, known: set[str]) -> bool:
        return _rule_ends(rules[name], rules, known)

    return "start" not in rules or _fixpoint(lambda: rules, ends, "start")


def _rule_ends(rule: Rule, rules: dict[str, Rule], known: set[str]) -> bool:
    if isinstance(rule, bool):
        return rule
    if isinstance(rule, str):
        return rule in known or rule not in rules
    kind, parts = rule
    return (any if kind == "any" else all)(_rule_ends(part, rules, known) for part in parts)


class _UnsupportedSyntax(Exception):
    """Signal syntax beyond what is analyzed here."""


class _Lark:
    """Parse the rules of a grammar; terminals, which cannot recur, count as ending."""

    def __init__(self, text: str):
        self._tokens = list(_tokens(text))
        self._at = 0

    def rules(self) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        while self._at < len(self._tokens):
            kind, value = self._next()
            if kind != "head":
                raise _UnsupportedSyntax
            found[str(value).lstrip("?!")] = self._any()
        return found

    def _next(self) -> tuple[str, Any]:
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self) -> tuple[str, Any]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", None)

    def _any(self) -> Rule:
        parts = [self._all()]
        while self._peek() == ("mark", "|"):
            self._next()
            parts.append(self._all())
        return "any", parts

    def _all(self) -> Rule:
        parts: list[Rule] = []
        while self._peek()[0] not in ("head", "end") and self._peek()[1] not in ("|", ")", "]"):
            kind, value = self._next()
            if value in ("&", "~"):
                continue
            if kind == "count" or value in ("?", "*", "+"):
                if not parts:
                    raise _UnsupportedSyntax
                parts[-1] = True if value in ("?", "*", 0) else parts[-1]
            else:
                parts.append(self._part(kind, value))
        return "all", parts

    def _part(self, kind: str, value: Any) -> Rule:
        if kind in ("ends", "name"):
            return bool(value) if kind == "ends" else str(value)
        if kind == "mark" and value in ("(", "["):
            inner = self._any()
            if self._peek() != ("mark", ")" if value == "(" else "]"):
                raise _UnsupportedSyntax
            self._next()
            return True if value == "[" else inner
        raise _UnsupportedSyntax


def _tokens(text: str) -> Iterable[tuple[str, Any]]:
    """Yield the tokens of a grammar.

    They are ("head", rule) where a rule begins, ("name", rule), ("ends", bool), ("count", least)
    and ("mark", character). Raises _UnsupportedSyntax for other syntax.
    """
    decoder, at, left = json.JSONDecoder(), 0, iter(range(_MOST_EVALUATIONS))
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _UnsupportedSyntax
        at = match.end()
        kind = str(match.lastgroup)
        if match["embedded"]:
            try:
                value, at = decoder.raw_decode(text, at)
            except ValueError:
                raise _UnsupportedSyntax from None
            if match["embedded"] != "%llguidance":
                yield "ends", match["embedded"] == "%regex" or schema_ends(value, left)
        elif match["name"]:
            is_rule = not match["name"].lstrip("?!_")[:1].isupper()
            yield (
                ("head", match["name"])
                if match["head"]
                else ("name", match["name"])
                if is_rule
                else ("ends", True)
            )
        elif match["literal"]:
            yield "ends", True
        elif match["count"]:
            yield "count", int(match["least"] or match["from"] or 0)
        elif kind == "mark":
            yield "mark", match["mark"]
