"""Define what a format of tool calls consists of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .parser import ToolParser
from .tool import Tool


class ReplyGrammar(Protocol):
    """Write replies that may hold calls, as rules in llguidance's variant of Lark's syntax.

    The rule `start` is first. several: more than one call is allowed. Schema keywords that no reply
    can be held to are refused where a tool is `strict`, and ignored elsewhere.
    """

    def required(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        """Return the rules of calls only, at least one."""
        ...

    def in_text(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        """Return the rules of any text, in which what begins a call becomes a valid one."""
        ...

    def instead(self, answer: str, tools: Sequence[Tool], *, several: bool) -> list[str]:
        """Return rules that match either tool calls or the expression `answer`."""
        ...


@dataclass(frozen=True, kw_only=True)
class CallGrammar:
    """Write calls that stand in the text, as `ReplyGrammar`.

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

    def required(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return [f"start: {literal(self.opening)} calls", *self._calls(tools, several=several)]

    def in_text(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        text = f"TEXT: /{self.text}/"
        if not self.anywhere:
            rules = [f"start: TEXT | {literal(self.opening)} calls", text]
            return rules + self._calls(tools, several=several)
        start = "(opening calls)* TEXT" if several else "TEXT | opening calls"
        rules = [f"start: {start}", f"opening[lazy]: TEXT {literal(self.opening)}", text]
        # Calls without an end of their list are several lists of one call each.
        return rules + self._calls(tools, several=several and bool(self.closing))

    def instead(self, answer: str, tools: Sequence[Tool], *, several: bool) -> list[str]:
        rules = [f"start: answer | {literal(self.opening)} calls", f"answer: {answer}"]
        return rules + self._calls(tools, several=several)

    def _calls(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        """Return a rule `calls` for what follows an opening: any tool with its arguments."""
        names = [f"tool_{index}" for index in range(len(tools))]
        more = f"({self.separator} call)*" if several else ""
        rules = [
            f"calls: {self.before} call {more} {self.closing}",
            f"call: {alternatives(names)}",
        ]
        for name, tool in zip(names, tools, strict=True):
            rules += self.call(name, tool)
        return rules


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Describe how some models write tool calls.

    markers: texts that are all in the chat templates of such models. tags: tokens of the format,
    which belong to the text even where a tokenizer calls them special. parser: None where the
    parser of the reasoning divides off calls too.
    """

    name: str
    markers: tuple[str, ...]
    tags: tuple[str, ...]
    parser: type[ToolParser] | None
    grammar: ReplyGrammar

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of a whole reply, and name and arguments of each of its calls."""
        if self.parser is None:
            raise ValueError(f"{self.name} is not parsed from text; use its parser of reasoning")
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
