"""Bound how deeply the parser and the compiler of a grammar recurse.

Both are native code that recurses without a check of its stack: per bracket, per argument of a
template, per rule that is defined through others, and per part of a schema. A stack that overflows
ends the process.
"""

from __future__ import annotations

import json
import re

# A level of a schema takes 5.6 KB of the stack, one of rules 3.2 KB (llguidance 1.9.1).
MOST_LEVELS = 10_000
STACK_BYTES = 256 << 20  # of a thread that compiles; untouched pages take no memory

# What is left open reaches to the end: the lexer refuses the grammar before anything recurses.
_TOKEN = re.compile(
    r"""(?P<skipped>"(?:\\.|[^"\\\n])*+"?|(?:\#|//)[^\n]*+|/(?:\\.|[^/\\])++/?|<[^<>\s]++>)
      | (?P<embedded>%(?:json|regex|llguidance)\s*+)
      | (?P<level>[(\[{~:])""",
    re.VERBOSE,
)
_STRING = re.compile(r'"(?:\\.|[^"\\])*+"')
_DECODER = json.JSONDecoder(parse_int=float)  # of any length


def count_levels(text: str) -> int:
    """Return the most levels that a grammar in Lark's syntax can have.

    They are its brackets, its rules, and the objects of its largest schema: each schema is compiled
    on its own, and no part of it within itself.
    """
    at = levels = objects = 0
    while (match := _TOKEN.search(text, at)) is not None:
        at = match.end()
        if match["level"]:
            levels += 1
        elif match["embedded"]:
            try:
                _, at = _DECODER.raw_decode(text, at)
            except json.JSONDecodeError:
                break  # the lexer refuses it
            objects = max(objects, _STRING.sub("", text[match.end() : at]).count("{"))
    return levels + objects
