"""Turn token ids into client text, without I/O.

Detokenize, divide off the reasoning, cut at stop strings, parse tool calls. The output after n ids
is a function of these ids alone, however they were grouped into calls of `feed`. This makes a
stream movable: replaying the ids that a client has received restores all text state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from motet_shared.messages import Text, ToolCallDelta
from motet_shared.reasoning.reply_parser import ReplyParser
from motet_shared.tool_formats.parser import ToolParser
from motet_tokenizer.detokenizer import Detokenizer
from motet_tokenizer.stops import StopStrings

_NO_CONTROLS: Mapping[int, str] = MappingProxyType({})


class TextState:
    """Keep the text state of one request.

    end_ids: tokens that end the reply and are not part of it. max_tokens: tokens after which it
    ends in any case. echo: text that is sent before the first token's. reply: a parser, if the
    model may reason. controls: names of the special tokens that it may need. tools: a parser, if
    the model may call tools. Stop strings end the text, not the reasoning.
    """

    __slots__ = (
        "_controls",
        "_deltas",
        "_detokenizer",
        "_echo",
        "_end_ids",
        "_feed",
        "_plain",
        "_reasoning",
        "_reply",
        "_stops",
        "_tools",
        "ended_by_token",
        "hidden",
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
        reply: ReplyParser | None = None,
        controls: Mapping[int, str] = _NO_CONTROLS,
        tools: ToolParser | None = None,
        echo: str = "",
    ):
        self._detokenizer = detokenizer
        self._feed = detokenizer.feed
        self._end_ids = end_ids
        self._stops = StopStrings(stops)
        self._reply = reply
        self._controls = controls
        self._tools = tools
        self._echo = echo
        self._reasoning: list[str] = []  # of the current piece
        self._deltas: list[ToolCallDelta] = []  # of the current piece
        self.max_tokens = max_tokens
        self.tokens = 0  # consumed
        self.length = 0  # characters sent, of reasoning, text and tool arguments
        self.status = ""  # finish reason, once complete
        self.ended_by_token = False  # the last token consumed is one of `end_ids`
        self.hidden: set[int] = set()  # which of the ids fed last are no part of the text
        self._plain = self._is_plain()

    @property
    def stopped(self) -> bool:
        """Return True if a stop string ended the reply, which decode does not know of."""
        return self._stops.hit

    @property
    def stop(self) -> str:
        """Return the stop string that ended the reply, or ""."""
        return self._stops.found

    @property
    def calls_tools(self) -> bool:
        """Return True from the first tool call on."""
        return self._tools is not None and self._tools.has_begun

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reply is None else self._reply.reasoning_tokens

    def _is_plain(self) -> bool:
        """Return True if the text is that of the detokenizer from here on."""
        return (
            (self._reply is None or self._reply.is_done)
            and not self._stops.any
            and self._tools is None
            and not self._echo
        )

    def feed(self, ids: list[int]) -> Text:
        """Return the text that `ids` complete; its `ids` end with the reply, so may be fewer."""
        return self.feed_plain(ids) or self._feed_each(ids)

    def feed_plain(self, ids: list[int]) -> Text | None:
        """Return the text of `ids` if it is the detokenizer's alone and the reply goes on behind it.

        Else return None: nothing was fed.
        """
        if self.hidden:
            self.hidden = set()
        if (
            self._plain
            and self.tokens + len(ids) < self.max_tokens
            and self._end_ids.isdisjoint(ids)
        ):
            text = self._feed(ids)
            self.tokens += len(ids)
            self.length += len(text)
            return Text(text, ids)
        return None

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
            parts.append(self._stops.feed(self._answer(token, taken - 1)))
            if self._stops.hit:
                self.status = "stop"
            elif self.tokens + taken >= self.max_tokens:
                self.status = "length"
        self.tokens += taken
        return self._piece("".join(parts), ids[:taken])

    def _answer(self, token: int, index: int) -> str:
        """Return the text of a token without its reasoning and tool calls, which are kept."""
        text = self._feed([token])
        reply = self._reply
        if reply is None or reply.is_done:
            return text
        reasoning, text, deltas = reply.feed(self._controls.get(token, ""), text)
        if reply.hides:
            self.hidden.add(index)
        self._reasoning.append(reasoning)
        self._deltas += deltas or ()
        return text

    def finish(self, status: str) -> Text:
        """Return all text held back, when the model has ended by itself. The result has no ids."""
        if self.status:
            return Text("", [])
        self.status = status
        return self._piece("", [])

    def _piece(self, text: str, ids: list[int]) -> Text:
        """Pass `text` through the tool parser; flush everything if the reply is complete."""
        if self.status and not self._stops.hit:
            text += self._stops.feed(self._rest())
            text += self._stops.flush()
        if self._tools is not None:
            text, deltas = self._parse(self._tools, text)
            self._deltas += deltas or ()
        self._note_calls()
        if self._echo:
            text, self._echo = self._echo + text, ""
        reasoning, deltas = "".join(self._reasoning), self._deltas
        self._reasoning, self._deltas = [], []
        self._plain = self._is_plain()
        self.length += len(reasoning) + len(text)
        self.length += sum([len(delta.arguments) for delta in deltas])
        return Text(text, ids, deltas or None, reasoning=reasoning)

    def _rest(self) -> str:
        """Return the text that detokenizer and reply parser hold back, at the end."""
        text = self._detokenizer.flush()
        if self._reply is None or self._reply.is_done:
            return text
        reasoning, text, deltas = self._reply.flush(text)
        self._reasoning.append(reasoning)
        self._deltas += deltas or ()
        return text

    def _parse(self, tools: ToolParser, text: str) -> tuple[str, list[ToolCallDelta] | None]:
        text, deltas = tools.feed(text)
        if not self.status:
            return text, deltas
        rest, more = tools.flush()
        return text + rest, [*(deltas or ()), *(more or ())] or None

    def _note_calls(self) -> None:
        """Replace the finish reason of a reply that stopped behind tool calls."""
        calls = (self._tools.calls if self._tools is not None else 0) + (
            self._reply.calls if self._reply is not None else 0
        )
        if self.status == "stop" and calls and not self._stops.hit:
            self.status = "tool_calls"
