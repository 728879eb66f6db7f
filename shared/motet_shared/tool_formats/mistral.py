"""Mistral: a tag, then a list of JSON objects, or (tokenizers from version 11 on) name and object.

[TOOL_CALLS] [{"name": "draw", "arguments": {"shape": "circle"}}, {"name": "stop", "arguments": {}}]
[TOOL_CALLS]draw[ARGS]{"shape": "circle"}[TOOL_CALLS]stop[ARGS]{}

(mistral-common, `InstructTokenizerV3` and `InstructTokenizerV11`.) The parser reads both.
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
    json_head,
)
from .tool_format import CallGrammar, ToolFormat, literal

OPENING, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LIST, NEXT = "list", "next"
_NAME = re.compile(r'(?P<name>[^\s\[\]{}"]{1,256})')
_CALL_ID = re.compile(r"(?P<id>[^\[\s]{0,256})")
_ID = (",", SPACE, '"id"', SPACE, ":", SPACE, '"', re.compile(r'[^"]{0,256}'), '"')


class MistralParser(JsonCallParser):
    opening = OPENING
    id_length = 9
    steps: ClassVar = {
        START: (
            Step(Expected(SPACE, "[", SPACE, BRACE), LIST, opens=True),
            Step(Expected(SPACE, _NAME, SPACE, BRACE), ARGUMENTS),
            Step(Expected(SPACE, _NAME, ARGS, SPACE, BRACE), ARGUMENTS),
            Step(
                Expected(SPACE, _NAME, CALL_ID, _CALL_ID, ARGS, SPACE, BRACE),
                ARGUMENTS,
            ),
        ),
        LIST: (Step(json_head("arguments"), ARGUMENTS),),
        AFTER: (
            Step(Expected(SPACE, "}", SPACE, ","), NEXT),
            Step(Expected(SPACE, "}", SPACE, "]"), TEXT),
            Step(Expected(SPACE, *_ID, SPACE, "}", SPACE, ","), NEXT),
            Step(Expected(SPACE, *_ID, SPACE, "}", SPACE, "]"), TEXT),
        ),
        NEXT: (Step(json_head("arguments"), ARGUMENTS),),
    }


def _list_head(name: str) -> str:
    return f'{{"name": {name}, "arguments": '


def _named_head(name: str) -> str:
    return name + ARGS


MISTRAL = ToolFormat(
    name="mistral",
    markers=(OPENING,),
    tags=(OPENING,),
    parser=MistralParser,
    grammar=CallGrammar(
        opening=OPENING,
        call=json_call_rules(_list_head, "}"),
        before='" "? "["',
        separator=literal(", "),
        closing=literal("]"),
    ),
)
MISTRAL_V11 = ToolFormat(
    name="mistral_v11",
    markers=(OPENING, ARGS),
    tags=(OPENING, ARGS, CALL_ID),
    parser=MistralParser,
    grammar=CallGrammar(
        opening=OPENING,
        call=json_call_rules(_named_head, "", quoted=False),
        separator=literal(OPENING),
    ),
)
