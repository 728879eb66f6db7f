"""Define what a format of reasoning consists of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar

from motet_shared.tool_formats.tool import Tool

from .reply_parser import ReplyParser

Message = dict[str, Any]


class Beginning(Enum):
    """Enumerate how much of the reasoning the prompt has written.

    The chat template may open it, so that the model continues it, or close it, so that the model
    answers at once.
    """

    OPTIONAL = "optional"  # nothing: the model decides
    OPEN = "open"
    CLOSED = "closed"


class ReasoningFormat(ABC):
    """Describe how some models write reasoning.

    name: for settings. markers: texts that are all in the chat templates of such models. ends:
    special tokens that end a reply. levels: values of `reasoning_effort` that the models know;
    empty: those that the template takes. parses_tools: its parser divides off tool calls too.
    """

    name: str
    markers: tuple[str, ...]
    ends: ClassVar[tuple[str, ...]] = ()
    levels: ClassVar[tuple[str, ...]] = ()
    parses_tools: ClassVar[bool] = False

    @property
    def tags(self) -> tuple[str, ...]:
        """Return tokens that belong to the text even where a tokenizer calls them special."""
        return ()

    @abstractmethod
    def beginning(self, prompt: str) -> Beginning:
        """Return how a reply begins behind this prompt, of which the end is enough."""

    @abstractmethod
    def parser(
        self, beginning: Beginning, request_id: str = "", tools: Sequence[Tool] = ()
    ) -> ReplyParser | None:
        """Return a parser for one reply, or None if it has no reasoning."""

    @abstractmethod
    def frame(self, beginning: Beginning, *, calls: bool = False) -> str:
        """Return the grammar of what precedes an answer (`messages.Grammar.frame`); empty: none.

        calls: the answer may be a tool call.
        """

    def history(self, message: Message, template: str) -> Message:
        """Return an earlier reply with its reasoning where this template expects it."""
        return message
