"""Read and write tool calls of Granite 3 and Phi-4-mini: a tag, then a list of JSON objects.

<|tool_call|>[{"name": "draw", "arguments": {"shape": "circle"}}, {"name": "stop", "arguments": {}}]

(The chat templates of ibm-granite/granite-3.3-8b-instruct and, with `<|/tool_call|>` at the end,
microsoft/Phi-4-mini-instruct.)
"""

from __future__ import annotations

from typing import ClassVar

from .expected import SPACE, Expected
from .json_calls import (
    AFTER,
    ARGUMENTS,
    BRACE,
    START,
    TEXT,
    JsonCallParser,
    Step,
    json_call_rules,
    json_head,
)
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<|tool_call|>", "<|/tool_call|>"
LIST, NEXT, END = "list", "next", "end"
_STEPS = {
    START: (Step(Expected(SPACE, "[", SPACE, BRACE), LIST, opens=True),),
    LIST: (Step(json_head("arguments"), ARGUMENTS),),
    NEXT: (Step(json_head("arguments"), ARGUMENTS),),
}


class GraniteParser(JsonCallParser):
    opening = OPENING
    steps: ClassVar = {
        **_STEPS,
        AFTER: (
            Step(Expected(SPACE, "}", SPACE, ","), NEXT),
            Step(Expected(SPACE, "}", SPACE, "]"), TEXT),
        ),
    }


class Phi4Parser(JsonCallParser):
    opening = OPENING
    steps: ClassVar = {
        **_STEPS,
        AFTER: (
            Step(Expected(SPACE, "}", SPACE, ","), NEXT),
            Step(Expected(SPACE, "}", SPACE, "]"), END),
        ),
        END: (Step(Expected(SPACE, CLOSING), TEXT),),
    }


def _head(name: str) -> str:
    return f'{{"name": {name}, "arguments": '


def _grammar(end: str) -> CallGrammar:
    return CallGrammar(
        opening=OPENING,
        before=literal("["),
        call=json_call_rules(_head, "}"),
        separator=literal(", "),
        closing=literal("]" + end),
    )


PHI4 = ToolFormat(
    name="phi4",
    markers=(OPENING, CLOSING),
    tags=(OPENING, CLOSING),
    parser=Phi4Parser,
    grammar=_grammar(CLOSING),
)
GRANITE = ToolFormat(
    name="granite",
    markers=(OPENING,),
    tags=(OPENING,),
    parser=GraniteParser,
    grammar=_grammar(""),
)
