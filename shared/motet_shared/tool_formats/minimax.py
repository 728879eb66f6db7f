"""MiniMax M2: a block of calls, each a function and its parameters as tags.

<minimax:tool_call>
<invoke name="draw">
<parameter name="shape">circle</parameter>
</invoke>
</minimax:tool_call>

(The chat template of MiniMaxAI/MiniMax-M2.)
"""

from __future__ import annotations

import re

from .expected import SPACE, Expected
from .parameter_calls import ParameterCallParser, parameter_rules
from .tool import Tool
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE = (SPACE, '<invoke name="', re.compile(r'(?P<name>[^"<>\n]{1,256})'), '">')


class MiniMaxParser(ParameterCallParser):
    opening = OPENING
    head = Expected(*_INVOKE)
    mark = re.compile(rf'<parameter name="([^"<>\n]+)">|</invoke>|(?={CLOSING})')
    value_close = "</parameter>"
    call_close = CLOSING
    repeats = True


def _call_rules(rule: str, tool: Tool) -> list[str]:
    return parameter_rules(
        rule,
        tool,
        head=literal(f'\n<invoke name="{tool.name}">\n'),
        opening=lambda key: literal(f'<parameter name="{key}">'),
        close="</parameter>\n",
        tail=literal("</invoke>"),
    )


MINIMAX = ToolFormat(
    name="minimax",
    markers=(OPENING, "<invoke name="),
    tags=(OPENING, CLOSING),
    parser=MiniMaxParser,
    grammar=CallGrammar(
        opening=OPENING,
        call=_call_rules,
        closing=literal(f"\n{CLOSING}"),
    ),
)
