"""Define what a format of tool calls consists of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .parser import ToolParser
from .tool import Tool


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """Write calls in llguidance's variant of Lark's syntax.

    Calls are `opening before call (separator call)* closing`; all but `opening`, which is text, are
    expressions or empty. call: returns the rules of a tool's calls; the first rule has the name
    that it is given. anywhere: calls may stand behind text; otherwise a reply is calls or text, and
    `text` is the regular expression of the text.
    """

    opening: str
    call: Callable[[str, Tool], list[str]]
    before: str = ""
    separator: str = ""
    closing: str = ""
    anywhere: bool = True
    text: str = r"(.|\n)*"


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How some models write tool calls.

    markers: texts that are all in the chat templates of such models. tags: tokens of the format,
    which belong to the text even where a tokenizer calls them special.
    """

    name: str
    markers: tuple[str, ...]
    tags: tuple[str, ...]
    parser: type[ToolParser]
    grammar: CallGrammar

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of a whole reply, and name and arguments of each of its calls."""
        parser = self.parser("", tools)
        before, deltas = parser.feed(text)
        after, more = parser.flush()
        calls: list[tuple[str, str]] = []
        for delta in [*(deltas or ()), *(more or ())]:
            if delta.id:
                calls.append((delta.name, ""))
            name, arguments = calls[-1]
            calls[-1] = name, arguments + delta.arguments
        return before + after, calls


def literal(text: str) -> str:
    """Return `text` as a string of a Lark grammar."""
    return json.dumps(text)


def alternatives(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"
