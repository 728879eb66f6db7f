"""Qwen3-Coder: a function and its parameters as tags.

<tool_call>
<function=draw>
<parameter=shape>
circle
</parameter>
</function>
</tool_call>

(The chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct.)
"""

from __future__ import annotations

import re

from .expected import SPACE, Expected
from .parameter_calls import ParameterCallParser, parameter_rules
from .tool import Tool
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Qwen3CoderParser(ParameterCallParser):
    opening = OPENING
    head = Expected(SPACE, "<function=", re.compile(r"(?P<name>[^<>\n]{1,256})"), ">")
    mark = re.compile(rf"<parameter=([^<>\n]+)>|</function>|(?={CLOSING})")
    value_close = "</parameter>"
    call_close = CLOSING


def _call_rules(rule: str, tool: Tool) -> list[str]:
    return parameter_rules(
        rule,
        tool,
        head=literal(f"\n<function={tool.name}>\n"),
        opening=lambda key: literal(f"<parameter={key}>\n"),
        close="\n</parameter>\n",
        tail=literal(f"</function>\n{CLOSING}"),
    )


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    markers=("<function=", "<parameter="),
    tags=(OPENING, CLOSING),
    parser=Qwen3CoderParser,
    grammar=CallGrammar(opening=OPENING, call=_call_rules, separator=literal("\n" + OPENING)),
)
