"""Parse formats in which the arguments of a call are a JSON object behind its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from motet_shared.text.grammars import json_rule

from .expected import SPACE, Expected
from .parser import ObjectScanner, ToolParser
from .tool import Tool
from .tool_format import literal

START, ARGUMENTS, AFTER, TEXT = "start", "arguments", "after", "text"

NAME = re.compile(r'(?P<name>[^"\\\x00-\x1f]{1,256})')
BRACE = re.compile(r"(?=\{)")  # arguments begin here


@dataclass(frozen=True)
class Step:
    """Describe what may follow in a state, and the state behind it.

    An expression called `name` begins a call; one called `id` is the call's id. opens: the matched
    text is restored if no call follows; otherwise it belongs to the calls before it.
    """

    expected: Expected
    state: str
    opens: bool = False


class JsonCallParser(ToolParser):
    """Parse calls by a table of steps for each state.

    In `START` the text is behind `opening`, in `AFTER` behind the arguments of a call; other
    states are the format's own. What matches no step of a state is text. No two steps of a state
    may match texts of which one continues the other.
    arguments_close: tag that ends arguments whose braces are not closed; empty: none.
    """

    steps: ClassVar[Mapping[str, Sequence[Step]]]
    arguments_close: ClassVar[str] = ""

    def __init__(self, request_id: str, tools: Sequence[Tool] = ()):
        super().__init__(request_id, tools)
        self._state = START
        self._scanner = ObjectScanner(self.arguments_close)

    def _parse_call(self) -> bool:
        if self._state == ARGUMENTS:
            if not self._read_object(self._scanner):
                return False
            self._state = AFTER
            return True
        steps = self.steps[self._state]
        for step in steps:
            if match := step.expected.match(self._buffer):
                self._take_step(step, match)
                return True
        if any(step.expected.may_match(self._buffer) for step in steps):
            return False
        self._abandon()
        return True

    def _take_step(self, step: Step, match: re.Match[str]) -> None:
        groups = match.groupdict()
        name = groups.get("name")
        if name is not None and not self._is_call(name):
            self._abandon()
            return
        self._buffer = self._buffer[match.end() :]
        if name is not None:
            self._begin_call(name, groups.get("id") or "")
            self._scanner.begin()
        else:
            self._lead = self._lead + match[0] if step.opens else ""
        if step.state == TEXT:
            self._abandon()
        else:
            self._state = step.state

    def _is_call(self, name: str) -> bool:
        """Return True if an object with this name is a call; by default any is."""
        return True

    def _abandon(self) -> None:
        """Continue with text, and restore what began a call that is none."""
        self._leave(self._buffer, restored=self._lead)
        self._state = START

    def _end_call(self, rest: str) -> None:
        if self._state == START or self._lead:
            self._text.append(self._lead + rest)
        self._state = START


def json_head(argument_key: str) -> Expected:
    """Return what is before the arguments of `{"name": "…", "ARGUMENT_KEY": {…}}`."""
    name = ("{", SPACE, '"name"', SPACE, ":", SPACE, '"', NAME, '"', SPACE, ",", SPACE)
    return Expected(SPACE, *name, f'"{argument_key}"', SPACE, ":", SPACE, BRACE)


def json_call_rules(
    head: Callable[[str], str], tail: str, *, quoted: bool = True, between: str = ""
) -> Callable[[str, Tool], list[str]]:
    """Return the `CallGrammar.call` of a format: the head with a tool's name, arguments, `tail`.

    quoted: the name is written as a JSON string. between: expression between head and arguments.
    """

    def rules(rule: str, tool: Tool) -> list[str]:
        name = json.dumps(tool.name, ensure_ascii=False) if quoted else tool.name
        arguments = json_rule(dict(tool.schema), lenient=not tool.strict)
        behind = literal(tail) if tail else ""
        return [f"{rule}: {literal(head(name))} {between} {arguments} {behind}"]

    return rules
