"""Read and write tool calls of DeepSeek V3, R1 and V3.1: a list between tags, each call between tags.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>draw
```json
{"shape": "circle"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes `draw<｜tool▁sep｜>{"shape": "circle"}` between the inner tags. (The chat templates of
deepseek-ai's checkpoints.) The parser reads both.
"""

from __future__ import annotations

import re
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
)
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
HEAD, BETWEEN = "head", "between"
_NAME = re.compile(r"(?P<name>[^\s<{]{1,256})")
_TAGS = (OPENING, CLOSING, CALL, CALL_END, SEPARATOR)


class DeepSeekParser(JsonCallParser):
    opening = OPENING
    arguments_close = CALL_END
    steps: ClassVar = {
        START: (Step(Expected(SPACE, CALL), HEAD, opens=True),),
        HEAD: (
            Step(Expected("function", SEPARATOR, _NAME, "\n```json\n", BRACE), ARGUMENTS),
            Step(Expected(_NAME, SEPARATOR, SPACE, BRACE), ARGUMENTS),
        ),
        AFTER: (
            Step(Expected(SPACE, "```", SPACE, CALL_END), BETWEEN),
            Step(Expected(SPACE, CALL_END), BETWEEN),
        ),
        BETWEEN: (
            Step(Expected(SPACE, CALL), HEAD, opens=True),
            Step(Expected(SPACE, CLOSING), TEXT),
        ),
    }


def _v3_head(name: str) -> str:
    return f"function{SEPARATOR}{name}\n```json\n"


def _v31_head(name: str) -> str:
    return name + SEPARATOR


DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    markers=(CALL, "```json"),
    tags=_TAGS,
    parser=DeepSeekParser,
    grammar=CallGrammar(
        opening=OPENING,
        before=literal(CALL),
        call=json_call_rules(_v3_head, f"\n```{CALL_END}", quoted=False),
        separator=literal("\n" + CALL),
        closing=literal(CLOSING),
    ),
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    markers=(CALL,),
    tags=_TAGS,
    parser=DeepSeekParser,
    grammar=CallGrammar(
        opening=OPENING,
        before=literal(CALL),
        call=json_call_rules(_v31_head, CALL_END, quoted=False),
        separator=literal(CALL),
        closing=literal(CLOSING),
    ),
)
