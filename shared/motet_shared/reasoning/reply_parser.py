"""Define how a reply is divided into reasoning, text and tool calls, token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from motet_shared.messages import ToolCallDelta


class Parts(NamedTuple):
    """Hold what some tokens of a reply add to its reasoning, its text and its tool calls."""

    reasoning: str = ""
    text: str = ""
    tools: list[ToolCallDelta] | None = None


class ReplyParser(ABC):
    """Keep the parser state of one reply.

    The parts that come out after n tokens are a function of these tokens alone. calls: complete
    tool calls. reasoning_tokens: tokens of reasoning, its tags included. hides: the last token is no
    part of the text, but of the reasoning or of the format.
    """

    calls: int = 0
    reasoning_tokens: int = 0
    hides: bool = False

    @property
    def is_done(self) -> bool:
        """Return True if all that follows is text, so that it need not pass this parser."""
        return False

    @abstractmethod
    def feed(self, control: str, text: str) -> Parts:
        """Return what has become certain with the next token.

        control: the name of a special token, which has no text; otherwise empty. text: what the
        token completes.
        """

    @abstractmethod
    def flush(self, text: str) -> Parts:
        """Return the rest at the end of the reply; `text` is what the detokenizer held back."""
