"""GLM-4.5 and later: the name of a function, then keys and values between tags.

<tool_call>draw
<arg_key>shape</arg_key>
<arg_value>circle</arg_value>
</tool_call>

(The chat templates of zai-org/GLM-4.5 and, without line breaks, GLM-4.7.)
"""

from __future__ import annotations

import re

from .expected import SPACE, Expected
from .parameter_calls import ParameterCallParser, parameter_rules
from .tool import Tool
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_BREAK = r'"\n"?'  # GLM-4.7 writes no line breaks
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


class Glm4Parser(ParameterCallParser):
    opening = OPENING
    head = Expected(SPACE, re.compile(r"(?P<name>[^\s<{]{1,256})"), re.compile(r"(?=[\s<])"))
    mark = re.compile(rf"{KEY}([^<]*){KEY_END}\s*{VALUE}|{CLOSING}")
    value_close = VALUE_END


def _call_rules(rule: str, tool: Tool) -> list[str]:
    return parameter_rules(
        rule,
        tool,
        head=literal(tool.name),
        opening=lambda key: f"{_BREAK} {literal(f'{KEY}{key}{KEY_END}')} {_BREAK} {literal(VALUE)}",
        close=VALUE_END,
        tail=f"{_BREAK} {literal(CLOSING)}",
    )


GLM4 = ToolFormat(
    name="glm4",
    markers=(KEY,),
    tags=(OPENING, CLOSING, KEY, KEY_END, VALUE, VALUE_END),
    parser=Glm4Parser,
    grammar=CallGrammar(opening=OPENING, call=_call_rules, separator=literal("\n" + OPENING)),
)
