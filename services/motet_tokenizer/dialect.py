"""Describe how one model writes replies: its formats of reasoning and tool calls, or its response template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from motet_shared.reasoning import registry as reasoning_formats
from motet_shared.reasoning.reasoning_format import Beginning, ReasoningFormat
from motet_shared.reasoning.reply_parser import ReplyParser
from motet_shared.tool_formats import registry as tool_formats
from motet_shared.tool_formats.parser import ToolParser
from motet_shared.tool_formats.tool import Tool
from motet_shared.tool_formats.tool_format import ToolFormat

from .response_template import ResponseFormat

_TAIL = 64  # tokens of a prompt that tell how its reply begins


@dataclass(frozen=True, slots=True)
class Dialect:
    """Formats of one model.

    A response template comes first in parsing; grammars are always those of the formats.
    """

    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    response: ResponseFormat | None = None

    @classmethod
    def of(
        cls,
        template: str,
        tool_format: str,
        reasoning_format: str,
        response: Callable[[], ResponseFormat | None],
    ) -> Dialect:
        """Return the dialect of a chat template, or the formats that are set.

        response: loads the response template, which a setting other than "auto" leaves out.
        """
        tools = (
            tool_formats.detect_format(template)
            if tool_format == "auto"
            else tool_formats.find_format(tool_format)
        )
        reasoning = _reasoning_format(reasoning_format, template, tools)
        is_auto = tool_format == reasoning_format == "auto"
        return cls(tools, reasoning, response() if is_auto else None)

    @property
    def reasons(self) -> bool:
        """Return True if replies may hold reasoning."""
        if self.response is not None:
            return self.response.reasons
        return self.reasoning_format is not None

    @property
    def calls_tools(self) -> bool:
        """Return True if it is known how replies hold tool calls."""
        if self.response is not None and self.response.calls_tools:
            return True
        return self.tool_format is not None

    @property
    def id_length(self) -> int:
        """Return how long ids of calls are in the chat template; 0 if it does not matter."""
        parser = None if self.tool_format is None else self.tool_format.parser
        return 0 if parser is None else parser.id_length

    def beginning(self, prompt: Callable[[int], str]) -> Beginning:
        """Return what the prompt has written of the reasoning."""
        if self.reasoning_format is None:
            return Beginning.OPTIONAL
        return self.reasoning_format.beginning(prompt(_TAIL))

    def frame(self, beginning: Beginning, *, calls: bool) -> str:
        """Return the grammar of what precedes an answer, or calls (`messages.Grammar.frame`)."""
        if self.reasoning_format is None:
            return ""
        return self.reasoning_format.frame(beginning, calls=calls)

    def parsers(
        self,
        prompt: Callable[[int], str],
        beginning: Beginning,
        request_id: str,
        tools: Sequence[dict[str, Any]],
    ) -> tuple[ReplyParser | None, ToolParser | None]:
        """Return the parsers of one reply: of its reasoning, and of the calls in its text.

        prompt: gives the last n tokens of the prompt as text. tools: those that may be called.
        """
        functions = [Tool.of(tool) for tool in tools]
        reply: ReplyParser | None = None
        if self.response is not None:
            reply = self.response.parser(prompt, request_id, tools)
            if self.response.calls_tools:
                return reply, None
        elif self.reasoning_format is not None:
            reply = self.reasoning_format.parser(beginning, request_id, functions)
        parser = None
        if tools and self.tool_format is not None and self.tool_format.parser is not None:
            parser = self.tool_format.parser(request_id, functions)
        return reply, parser


def _reasoning_format(
    name: str, template: str, tool_format: ToolFormat | None
) -> ReasoningFormat | None:
    """Return a format by name, or that of the template; harmony's also if its calls need it."""
    if tool_format is not None and tool_format.parser is None:
        return reasoning_formats.find_format(tool_format.name)
    if name == "auto":
        return reasoning_formats.detect_format(template)
    return None if name == "none" else reasoning_formats.find_format(name)
