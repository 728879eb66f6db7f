"""Kimi K2: a section of calls, each with an id that holds its name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.draw:0<|tool_call_argument_begin|>
{"shape": "circle"}<|tool_call_end|><|tool_calls_section_end|>

(The chat template of moonshotai/Kimi-K2-Instruct; the line is broken here only.) Ids are passed on,
as the template expects them in the results of calls.
"""

from __future__ import annotations

import re
from typing import ClassVar

from .expected import SPACE, Expected
from .json_calls import AFTER, ARGUMENTS, BRACE, START, TEXT, JsonCallParser, Step, json_call_rules
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
SEPARATOR = "<|tool_call_argument_begin|>"
HEAD, BETWEEN = "head", "between"
_ID = re.compile(r"(?P<id>(?:functions\.)?(?P<name>[^\s<:]{1,256})(?::\d*)?)")


class KimiK2Parser(JsonCallParser):
    opening = OPENING
    arguments_close = CALL_END
    steps: ClassVar = {
        START: (Step(Expected(SPACE, CALL), HEAD, opens=True),),
        HEAD: (Step(Expected(SPACE, _ID, SPACE, SEPARATOR, SPACE, BRACE), ARGUMENTS),),
        AFTER: (Step(Expected(SPACE, CALL_END), BETWEEN),),
        BETWEEN: (
            Step(Expected(SPACE, CALL), HEAD, opens=True),
            Step(Expected(SPACE, CLOSING), TEXT),
        ),
    }


def _head(name: str) -> str:
    return f"functions.{name}:"


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    markers=(OPENING, SEPARATOR),
    tags=(OPENING, CLOSING, CALL, CALL_END, SEPARATOR),
    parser=KimiK2Parser,
    grammar=CallGrammar(
        opening=OPENING,
        before=literal(CALL),
        call=json_call_rules(
            _head, CALL_END, quoted=False, between=rf"/\d{{1,4}}/ {literal(SEPARATOR)}"
        ),
        separator=literal(CALL),
        closing=literal(CLOSING),
    ),
)
