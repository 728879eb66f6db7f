"""Build the items of a reply from what arrives: each is opened, grows, and is closed.

An item is announced before its parts, and every delta of an item lies between its opening and its
closing. One item is open at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from motet_shared.messages import Audio, ToolCallDelta

from .events import (
    ArgumentsDelta,
    Event,
    OutputClosed,
    OutputKind,
    OutputOpened,
    SpeechDelta,
    TextDelta,
)
from .history import History, Item, new_id
from .spoken_words import SpokenWords


class _OpenOutput(ABC):
    """Output of a reply that still grows."""

    kind: OutputKind

    def __init__(self, reply_id: str, index: int):
        self.reply_id, self.index = reply_id, index
        self.item_id = new_id("item", f"{reply_id} {index}")

    @abstractmethod
    def item(self, status: str) -> Item:
        """Return the item as it is now."""

    def rest(self, status: str) -> list[Event]:
        """Return the deltas that remain when it is closed with `status`."""
        return []

    def _message(self, status: str, part: dict[str, str]) -> Item:
        base = {"id": self.item_id, "object": "realtime.item", "type": "message", "status": status}
        return {**base, "role": "assistant", "content": [part] if status != "in_progress" else []}


class _TextMessage(_OpenOutput):
    kind = "text"

    def __init__(self, reply_id: str, index: int):
        super().__init__(reply_id, index)
        self._texts: list[str] = []

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return TextDelta(self.reply_id, self.index, text)

    def item(self, status: str) -> Item:
        return self._message(status, {"type": "output_text", "text": "".join(self._texts)})


class _SpokenMessage(_OpenOutput):
    """Spoken message; text that is written but not yet spoken is not reported."""

    kind = "speech"

    def __init__(self, reply_id: str, index: int):
        super().__init__(reply_id, index)
        self.words = SpokenWords()
        self._reported = ""

    def add(self, batch: list[Audio]) -> Event:
        """Add audio; the event has it, and the words that it completes."""
        self.words.note(batch)
        pcm = b"".join([item.data for item in batch])
        return SpeechDelta(self.reply_id, self.index, pcm, self._advance(self.words.spoken))

    def rest(self, status: str) -> list[Event]:
        if status != "completed" or not (words := self._advance(len(self.words.text))):
            return []
        return [SpeechDelta(self.reply_id, self.index, b"", words)]

    def item(self, status: str) -> Item:
        """Return the item with the reported transcript, or less if it was truncated meanwhile."""
        is_whole = len(self._reported) <= len(self.words.text)
        transcript = self._reported if is_whole else self.words.text
        return self._message(status, {"type": "output_audio", "transcript": transcript})

    def _advance(self, until: int) -> str:
        fresh = self.words.text[len(self._reported) : until]
        self._reported += fresh
        return fresh


class _FunctionCall(_OpenOutput):
    """Function call that the caller is to carry out."""

    kind = "function_call"

    def __init__(self, reply_id: str, index: int, first: ToolCallDelta):
        super().__init__(reply_id, index)
        self.number = first.index
        self._name = first.name
        self._call_id = first.id or self.item_id.replace("item_", "call_")
        self._arguments: list[str] = []

    def add(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        return ArgumentsDelta(self.reply_id, self.index, arguments)

    def item(self, status: str) -> Item:
        return {
            "id": self.item_id,
            "object": "realtime.item",
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }


class ReplyItems:
    """Build the items of one reply, and store them in `history` unless it is None.

    `spoken` receives the words of spoken items in `history`, by item id.
    """

    def __init__(self, reply_id: str, history: History | None, spoken: dict[str, SpokenWords]):
        self._reply_id, self._history, self._spoken = reply_id, history, spoken
        self._open: _OpenOutput | None = None
        self.items: list[Item] = []

    @property
    def empty(self) -> bool:
        return self._open is None and not self.items

    @property
    def is_text_open(self) -> bool:
        """Return True if further text is added to an item that is open."""
        return isinstance(self._open, _TextMessage)

    def text(self, text: str, events: list[Event]) -> None:
        """Append the events of a piece of text to `events`."""
        message = self._open
        if not isinstance(message, _TextMessage):
            message = _TextMessage(self._reply_id, self._next(events))
            self._start(message, events)
        events.append(message.add(text))

    def write(self, text: str, events: list[Event]) -> None:
        """Add text to be spoken: opens the message; its words are reported with their audio."""
        message = self._open
        if not isinstance(message, _SpokenMessage):
            message = _SpokenMessage(self._reply_id, self._next(events))
            if self._history is not None:  # only items of the conversation can be truncated
                self._spoken[message.item_id] = message.words
            self._start(message, events)
        message.words.write(text)

    def audio(self, batch: list[Audio], events: list[Event]) -> None:
        """Append the events of the audio of what was written."""
        if isinstance(self._open, _SpokenMessage):
            events.append(self._open.add(batch))

    def tool(self, piece: ToolCallDelta, events: list[Event]) -> None:
        """Append the events of a piece of a tool call to `events`."""
        call = self._open
        if not isinstance(call, _FunctionCall) or piece.index != call.number:
            call = _FunctionCall(self._reply_id, self._next(events), piece)
            self._start(call, events)
        if piece.arguments:
            events.append(call.add(piece.arguments))

    def finish(self, status: str, events: list[Event]) -> None:
        """Close what is open. A reply that completed without output gets an empty message."""
        if self.empty and status == "completed":
            self._start(_TextMessage(self._reply_id, self._next(events)), events)
        self._close(status, events)

    def settle(self, items: list[Item]) -> None:
        """Keep the items as they were reported to the caller."""
        if items != self.items:
            self.items = items
            for item in items:
                if self._history is not None:
                    self._history.replace(item)

    def _next(self, events: list[Event]) -> int:
        """Return the index of the next output; closes the output that is still open."""
        self._close("completed", events)
        return len(self.items)

    def _start(self, output: _OpenOutput, events: list[Event]) -> None:
        item = output.item("in_progress")
        previous = None if self._history is None else self._history.insert(item, bounded=False)
        self._open = output
        events.append(OutputOpened(self._reply_id, output.index, output.kind, item, previous))

    def _close(self, status: str, events: list[Event]) -> None:
        if (output := self._open) is None:
            return
        self._open = None
        events += output.rest(status)
        item = output.item(status)
        self.items.append(item)
        previous = None if self._history is None else self._history.replace(item)
        events.append(OutputClosed(self._reply_id, output.index, item, previous))
