"""Llama 3.1 to 4: a reply that is nothing but JSON objects, without tags.

{"name": "draw", "parameters": {"shape": "circle"}}; {"name": "stop", "parameters": {}}

(Meta, "Llama 3.1 prompt format", 2024: JSON-based tool calling.) An object counts as a call if it
has the name of a given tool, and only where no text is before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .expected import SPACE, Expected
from .json_calls import (
    AFTER,
    ARGUMENTS,
    BRACE,
    NAME,
    START,
    JsonCallParser,
    Step,
    json_call_rules,
    json_head,
)
from .tool import Tool
from .tool_format import CallGrammar, ToolFormat, literal

SEPARATOR = "separator"
_TYPED = ("{", SPACE, '"type"', SPACE, ":", SPACE, '"function"', SPACE, ",", SPACE)
_NAMED = ('"name"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, ",", SPACE)
_PARAMETERS = ('"parameters"', SPACE, ":", SPACE, BRACE)


class Llama3Parser(JsonCallParser):
    opening = "{"
    steps: ClassVar = {
        START: (
            Step(json_head("parameters"), ARGUMENTS),
            Step(json_head("arguments"), ARGUMENTS),
            Step(Expected(*_TYPED, *_NAMED, *_PARAMETERS), ARGUMENTS),
        ),
        AFTER: (Step(Expected(SPACE, "}"), SEPARATOR),),
        SEPARATOR: (
            Step(Expected(SPACE, ";", SPACE, BRACE), START, opens=True),
            Step(Expected(SPACE, BRACE), START, opens=True),
        ),
    }

    def __init__(self, request_id: str, tools: Sequence[Tool] = ()):
        super().__init__(request_id, tools)
        self._is_text = False  # text has been found, so no call can follow

    def _find_opening(self) -> bool:
        if self._is_text:
            self._text.append(self._buffer)
            self._buffer = ""
            return False
        rest = self._buffer.lstrip()
        space = "" if self._after_call else self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = space + rest
        if not rest:
            return False
        if rest.startswith(self.opening):
            self._lead, self._buffer, self._in_call = space, rest, True
        else:
            self._is_text = True
        return True

    def _is_call(self, name: str) -> bool:
        return not self.tools or name in self.tools

    def _abandon(self) -> None:
        self._is_text = self._is_text or self._state == START
        super()._abandon()


def _head(name: str) -> str:
    return f'"name": {name}, "parameters": '


LLAMA3 = ToolFormat(
    name="llama3",
    markers=('"parameters": ', "<|eot"),
    tags=(),
    parser=Llama3Parser,
    grammar=CallGrammar(
        opening="{",
        call=json_call_rules(_head, "}"),
        separator=literal("; {"),
        anywhere=False,
        text=r"\s*([^{\s](.|\n)*)?",
    ),
)
