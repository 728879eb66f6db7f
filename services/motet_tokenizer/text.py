"""Turn token ids into client text: detokenize, cut at stop strings, parse tool calls; without I/O.

The output after n ids is a function of these ids alone, however they were grouped into calls of
`feed`. This makes a stream movable: replaying the ids that a client has received restores all text
state.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet_shared.messages import Text, ToolCallDelta
from motet_shared.tool_formats.parser import ToolParser
from motet_tokenizer.detokenizer import Detokenizer
from motet_tokenizer.stops import StopStrings


class TextState:
    """Keep the text state of one request.

    end_ids: tokens that end the reply and are not part of it. max_tokens: tokens after which it
    ends in any case. echo: text that is sent before the first token's. tools: a parser, if the
    model may call tools.
    """

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_end_ids",
        "_feed",
        "_plain",
        "_stops",
        "_tools",
        "ended_by_token",
        "length",
        "max_tokens",
        "status",
        "tokens",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        end_ids: frozenset[int] = frozenset(),
        max_tokens: int,
        stops: Sequence[str] = (),
        tools: ToolParser | None = None,
        echo: str = "",
    ):
        self._detokenizer = detokenizer
        self._feed = detokenizer.feed
        self._end_ids = end_ids
        self._stops = StopStrings(stops)
        self._tools = tools
        self._echo = echo
        self._plain = not any(stops) and tools is None and not echo
        self.max_tokens = max_tokens
        self.tokens = 0  # consumed
        self.length = 0  # characters sent, of text and tool arguments
        self.status = ""  # finish reason, once complete
        self.ended_by_token = False  # the last token consumed is one of `end_ids`

    @property
    def stopped(self) -> bool:
        """Return True if a stop string ended the reply, which decode does not know of."""
        return self._stops.hit

    def feed(self, ids: list[int]) -> Text:
        """Return the text that `ids` complete; its `ids` end with the reply, so may be fewer."""
        if (
            self._plain
            and self.tokens + len(ids) < self.max_tokens
            and self._end_ids.isdisjoint(ids)
        ):
            text = self._feed(ids)
            self.tokens += len(ids)
            self.length += len(text)
            return Text(text, ids)
        return self._feed_each(ids)

    def _feed_each(self, ids: list[int]) -> Text:
        parts: list[str] = []
        taken = 0
        for token in ids:
            if self.status:
                break
            taken += 1
            if token in self._end_ids:
                self.status, self.ended_by_token = "stop", True
                continue
            parts.append(self._stops.feed(self._feed([token])))
            if self._stops.hit:
                self.status = "stop"
            elif self.tokens + taken >= self.max_tokens:
                self.status = "length"
        self.tokens += taken
        return self._piece("".join(parts), ids[:taken])

    def finish(self, status: str) -> Text:
        """Return all text held back, when the model has ended by itself. The result has no ids."""
        if self.status:
            return Text("", [])
        self.status = status
        return self._piece("", [])

    def _piece(self, text: str, ids: list[int]) -> Text:
        """Pass `text` through the tool parser; flush everything if the reply is complete."""
        if self.status and not self._stops.hit:
            text += self._stops.feed(self._detokenizer.flush()) + self._stops.flush()
        deltas: list[ToolCallDelta] | None = None
        if self._tools is not None:
            text, deltas = self._parse(self._tools, text)
        if self._echo:
            text, self._echo = self._echo + text, ""
        self.length += len(text)
        if deltas:
            self.length += sum([len(delta.arguments) for delta in deltas])
        return Text(text, ids, deltas)

    def _parse(self, tools: ToolParser, text: str) -> tuple[str, list[ToolCallDelta] | None]:
        text, deltas = tools.feed(text)
        if not self.status:
            return text, deltas
        rest, more = tools.flush()
        if self.status == "stop" and tools.calls and not self._stops.hit:
            self.status = "tool_calls"
        return text + rest, [*(deltas or ()), *(more or ())] or None
