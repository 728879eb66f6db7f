"""Pythonic calls: a reply that is nothing but a list of calls in Python's syntax.

[draw(shape="circle", size=3), stop()]

(Meta, "Llama 3.2 prompt format", 2024: zero-shot function calling; used by Llama 3.2 and 4, and by
ToolACE.) A list counts as calls if it begins with the name of a given tool, and only where no text
is before it. An argument is emitted once it is complete.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from motet_shared.text.grammars import json_rule

from .expected import SPACE, Expected
from .parameter_calls import json_value
from .parser import ToolParser
from .tool import Tool
from .tool_format import CallGrammar, ToolFormat, alternatives, literal

OPENING = "["
_NAME = r"[A-Za-z_][\w.\-]{0,255}"
_HEAD = Expected(SPACE, re.compile(rf"(?P<name>{_NAME})"), SPACE, "(")
_NEXT = Expected(SPACE, ",", SPACE, re.compile(rf"(?P<name>{_NAME})"), SPACE, "(")
_END = Expected(SPACE, "]")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_MARK = re.compile(r"""["'()\[\]{},]""")
_IN_STRING = re.compile(r"""[\\"']""")
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class _State(Enum):
    HEAD = "head"
    ARGUMENTS = "arguments"
    AFTER = "after"  # behind a call


class PythonicParser(ToolParser):
    opening = OPENING

    def __init__(self, request_id: str, tools: Sequence[Tool] = ()):
        super().__init__(request_id, tools)
        self._state = _State.HEAD
        self._scanner = LiteralScanner()
        self._is_text = False  # text has been found, so no call can follow
        self._properties: list[str] = []  # names of the current tool's arguments
        self._count = 0  # arguments of the current call

    def _find_opening(self) -> bool:
        if self._is_text:
            self._text.append(self._buffer)
            self._buffer = ""
            return False
        rest = self._buffer.lstrip()
        if not rest:
            self._buffer = "" if self._after_call else self._buffer
            return False
        if not self._after_call and rest.startswith(OPENING):
            self._lead = self._buffer[: -len(rest)] + OPENING
            self._buffer, self._in_call = rest[1:], True
        else:
            self._buffer = rest if self._after_call else self._buffer
            self._is_text = True
        return True

    def _parse_call(self) -> bool:
        if self._state is _State.HEAD:
            return self._read_head(_HEAD)
        if self._state is _State.ARGUMENTS:
            return self._read_argument()
        if match := _END.match(self._buffer):
            self._return(self._buffer[match.end() :])
            return True
        return self._read_head(_NEXT)

    def _end_call(self, rest: str) -> None:
        if self._state is _State.HEAD:
            self._text.append(self._lead + rest)
        self._state = _State.HEAD

    def _return(self, rest: str, *, restored: str = "") -> None:
        self._state = _State.HEAD
        self._leave(rest, restored=restored)

    def _read_head(self, head: Expected) -> bool:
        match = head.match(self._buffer)
        if match is None or (self.tools and match["name"] not in self.tools):
            expected = (head,) if self._state is _State.HEAD else (head, _END)
            if match is None and any(one.may_match(self._buffer) for one in expected):
                return False
            self._is_text = True
            self._return(self._buffer, restored=self._lead)
            return True
        self._begin_call(match["name"])
        self._buffer = self._buffer[match.end() :]
        self._state, self._count = _State.ARGUMENTS, 0
        tool = self.tools.get(match["name"])
        properties = None if tool is None else tool.schema.get("properties")
        self._properties = [*properties] if isinstance(properties, Mapping) else []
        self._scanner.begin()
        self._add_arguments("{")
        return True

    def _read_argument(self) -> bool:
        """Emit the next argument, or the end of the call."""
        end = self._scanner.scan(self._buffer)
        if end < 0:
            return False
        text, mark = self._buffer[:end], self._buffer[end]
        if text.strip():
            self._emit_argument(text)
        self._buffer = self._buffer[end + 1 :]
        self._scanner.begin()
        if mark == ")":
            self._add_arguments("}")
            self.calls += 1
            self._state = _State.AFTER
        return True

    def _emit_argument(self, text: str) -> None:
        """Emit `name=value`, or a value, which has the name of its place in the schema."""
        key = _KEY.match(text)
        if key:
            name, text = key[1], text[key.end() :]
        elif self._count < len(self._properties):
            name = self._properties[self._count]
        else:
            name = f"argument_{self._count}"
        item = f"{json.dumps(name, ensure_ascii=False)}: {literal_value(text)}"
        self._add_arguments(f", {item}" if self._count else item)
        self._count += 1


class LiteralScanner:
    """Find the end of an argument in streamed text: a comma or parenthesis outside of brackets."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start before the first character of an argument."""
        self._at = 0  # what is before has been scanned
        self._depth = 0
        self._quote = ""

    def scan(self, text: str) -> int:
        """Return where the argument that begins `text` ends; -1 if more text is needed.

        Call it again with the same text, prolonged.
        """
        while self._at < len(text):
            if self._quote and not self._leave_string(text):
                return -1
            mark = _MARK.search(text, self._at)
            if mark is None:
                self._at = len(text)
                return -1
            at, sign = mark.start(), mark[0]
            if sign in "\"'":
                if not self._enter_string(text, at, sign):
                    return -1
                continue
            if self._depth == 0 and sign in ",)":
                return at
            self._at, self._depth = at + 1, max(0, self._depth + _DEPTH.get(sign, 0))
        return -1

    def _enter_string(self, text: str, at: int, sign: str) -> bool:
        """Skip the quote at `at`. Return False if it may be one of three."""
        rest = text[at : at + 3]
        if len(rest) < 3 and rest == sign * len(rest):
            self._at = at
            return False
        self._quote = sign * 3 if rest == sign * 3 else sign
        self._at = at + len(self._quote)
        return True

    def _leave_string(self, text: str) -> bool:
        """Skip to behind the closing quote. Return False if it is not there yet."""
        while mark := _IN_STRING.search(text, self._at):
            at = self._at = mark.start()
            if mark[0] == "\\":
                if at + 2 > len(text):
                    return False
                self._at = at + 2
            elif text.startswith(self._quote, at):
                self._at, self._quote = at + len(self._quote), ""
                return True
            elif self._quote.startswith(text[at:]):
                return False
            else:
                self._at = at + 1
        self._at = len(text)
        return False


def literal_value(text: str) -> str:
    """Return a Python or JSON literal as JSON; text that is neither becomes a string."""
    text = text.strip()
    value = json_value(text)
    if value is None:
        value = _python_value(text)
    return json.dumps(text, ensure_ascii=False) if value is None else value


def _python_value(text: str) -> str | None:
    try:
        with warnings.catch_warnings():  # of escapes that Python does not know
            warnings.simplefilter("ignore")
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


# -------------------------------------------------------------------------------------------- grammar
def _call_rules(rule: str, tool: Tool) -> list[str]:
    """Return the rules of a tool's calls, with its arguments in the schema's order, as JSON."""
    listed = tool.schema.get("properties")
    properties: Mapping[str, Any] = listed if isinstance(listed, Mapping) else {}
    required = tool.schema.get("required")
    required = required if isinstance(required, list) else []
    rules, rest = [], ""
    firsts = []
    for index, (key, schema) in reversed([*enumerate(properties.items())]):
        value = json_rule(_with_definitions(schema, tool.schema), lenient=not tool.strict)
        rules.append(f"{rule}_{index}: {literal(f'{key}=')} {value}")
        firsts.append(f"{rule}_{index} {rest}")
        if key in required:
            firsts = firsts[-1:]
        more = f'(", " {rule}_{index})' + ("" if key in required else "?")
        rules.append(f"{rule}_from_{index}: {more} {rest}")
        rest = f"{rule}_from_{index}"
    arguments = alternatives(firsts) if firsts else ""
    optional = "" if any(key in required for key in properties) or not firsts else "?"
    return [f'{rule}: {literal(f"{tool.name}(")} {arguments}{optional} ")"', *rules]


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a property's schema with the definitions that its references point to."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**kept, **(schema if isinstance(schema, Mapping) else {})}


PYTHONIC = ToolFormat(
    name="pythonic",
    markers=("[func_name1(",),
    tags=(),
    parser=PythonicParser,
    grammar=CallGrammar(
        opening=OPENING,
        call=_call_rules,
        separator=literal(", "),
        closing=literal("]"),
        anywhere=False,
        text=r"\s*([^\[\s](.|\n)*)?",
    ),
)
