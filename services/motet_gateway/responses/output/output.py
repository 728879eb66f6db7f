"""Build the output items of a response from the texts of a chat.

What it emits is a function of the texts alone: ids are made of the response's id and the item's
index. So a response that another process goes on with has the same events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from motet_shared.messages import Text, TextLogprob, ToolCallDelta

from .events import Deltas, Events
from .output_items import OpenCall, OpenCustomCall, OpenImage, OpenItem, OpenMessage, OpenReasoning

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "image_generation_call": "ig",
}


def item_id(response_id: str, kind: str, index: str) -> str:
    """Return the id of an item of a response; that of an input item has an index such as i0.

    It names the response, so that the item can be found by its id.
    """
    return f"{_PREFIXES[kind]}_{response_id.partition('_')[2]}_{index}"


class Output:
    """Build the output items of one response.

    `custom`: names of tools whose input is free text. `logprobs`: texts have log-probabilities.
    `encrypted`: reasoning has `encrypted_content`. Without `events`, nothing is rendered.
    """

    def __init__(
        self,
        response_id: str,
        events: Events | None = None,
        *,
        custom: frozenset[str] = frozenset(),
        logprobs: bool = False,
        encrypted: bool = False,
    ):
        self.items: list[dict[str, Any]] = []
        self.encrypted = encrypted
        self._response_id, self._events = response_id, events
        self._custom, self._logprobs = custom, logprobs
        self._open: OpenItem | None = None
        self._call = -1  # index of the tool call that is open
        self._held = ""  # white space that precedes a message, or else a call

    def add(self, batch: Sequence[Text]) -> None:
        """Add what the model wrote: reasoning, text and tool calls, in this order in each item.

        What goes on with an open call precedes them: an item may hold its end and the text behind it.
        """
        for item in batch:
            pieces = deque(item.tools or ())
            while pieces and self._is_in_call and pieces[0].index == self._call:
                self._tool(pieces.popleft())
            if item.reasoning:
                self._as(OpenReasoning).text(item.reasoning)
            if item.text or item.logprobs:
                self._text(item.text, item.logprobs or [])
            for piece in pieces:
                self._tool(piece)

    def finish(self, status: str = "completed") -> None:
        """End the open item; `status` says whether it is complete."""
        if self._open is not None:
            self._open.close(status)
            self._open = None

    @property
    def snapshot(self) -> list[dict[str, Any]]:
        """Return all items, the open one as far as it is known."""
        return [*self.items, *([self._open.shape("incomplete")] if self._open else ())]

    @property
    def image(self) -> OpenImage:
        """Return the image that is being drawn; one is begun if there is none."""
        found: OpenImage = self._as(OpenImage)
        return found

    def _text(self, text: str, logprobs: list[TextLogprob]) -> None:
        if not isinstance(self._open, OpenMessage):
            self._held += text
            if not self._held.strip() and not self._logprobs:
                return
            text, self._held = self._held, ""
        self._as(OpenMessage).text(text, logprobs)

    @property
    def _is_in_call(self) -> bool:
        return isinstance(self._open, OpenCall | OpenCustomCall)

    def _tool(self, piece: ToolCallDelta) -> None:
        if piece.index != self._call or not self._is_in_call:
            self.finish()
            self._call, self._held = piece.index, ""
            kind = OpenCustomCall if piece.name in self._custom else OpenCall
            self._begin(kind(self, piece.id, piece.name))
        if isinstance(self._open, OpenCall | OpenCustomCall) and piece.arguments:
            self._open.arguments(piece.arguments)

    # -------------------------------------------------------------------------------------- items
    def _as(self, kind: type[Any]) -> Any:
        """Return the open item, which is begun if it is of another kind."""
        if not isinstance(self._open, kind):
            self.finish()
            self._begin(kind(self))
        return self._open

    def _begin(self, item: OpenItem) -> None:
        self._open = item
        item.begin()

    def emit(self, kind: str, **fields: Any) -> None:
        if self._events is not None:
            self._events.add(kind, **fields)

    def deltas(self, kind: str, **fields: Any) -> Deltas | None:
        return self._events.deltas(kind, **fields) if self._events is not None else None

    def next_id(self, kind: str) -> str:
        return item_id(self._response_id, kind, str(len(self.items)))
