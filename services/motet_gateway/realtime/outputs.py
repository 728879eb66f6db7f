"""Render the items that a response produces: each opens, grows by deltas and closes, with events.

The order is that of OpenAI's service (see the table in the README): an item is announced before its
parts, every part is closed before its item, and the `done` events repeat the sum of the deltas.
"""

from __future__ import annotations

from typing import Any

from motet_shared.messages import Audio, ToolCallDelta

from .audio_settings import PCM, Format
from .channel import Channel, Deltas
from .conversation import Conversation, Stored, new_id
from .output_position import OutputPosition
from .speech_output import SpeechOutput
from .spoken_words import SpokenWords


class MessageOutput:
    """Render a text message of the assistant."""

    def __init__(self, place: OutputPosition, item_id: str):
        self._place = place
        self._texts: list[str] = []
        self._where = {
            "response_id": place.response_id,
            "item_id": item_id,
            "output_index": place.output_index,
            "content_index": 0,
        }
        self._deltas = Deltas(place.channel, "response.output_text.delta", **self._where)
        self._item_id = item_id

    def open(self) -> list[bytes]:
        events = self._place.opened(self._item("in_progress"))
        part = {"type": "text", "text": ""}
        return [
            *events,
            self._place.channel.event("response.content_part.added", **self._where, part=part),
        ]

    def delta(self, text: str) -> bytes:
        self._texts.append(text)
        return self._deltas.render(text)

    def close(self, status: str) -> tuple[Stored, list[bytes]]:
        """Return the finished item and its closing events. `status`: completed or incomplete."""
        event, item = self._place.channel.event, self._item(status)
        text = "".join(self._texts)
        events = [
            event("response.output_text.done", **self._where, text=text),
            event("response.content_part.done", **self._where, part={"type": "text", "text": text}),
        ]
        return item, events + self._place.closed(item)

    def _item(self, status: str) -> Stored:
        text = "".join(self._texts)
        content = [{"type": "output_text", "text": text}] if status != "in_progress" else []
        base = {"id": self._item_id, "object": "realtime.item", "type": "message", "status": status}
        return {**base, "role": "assistant", "content": content}


class CallOutput:
    """Render a function call that the client is to carry out."""

    def __init__(self, place: OutputPosition, item_id: str, first: ToolCallDelta):
        self._place = place
        self._arguments: list[str] = []
        self._name = first.name
        self._item_id = item_id
        self._call_id = first.id or item_id.replace("item_", "call_")
        self._where: dict[str, Any] = {
            "response_id": place.response_id,
            "item_id": item_id,
            "output_index": place.output_index,
            "call_id": self._call_id,
        }
        self._deltas = Deltas(
            place.channel, "response.function_call_arguments.delta", **self._where
        )

    def open(self) -> list[bytes]:
        return self._place.opened(self._item("in_progress"))

    def delta(self, arguments: str) -> bytes:
        self._arguments.append(arguments)
        return self._deltas.render(arguments)

    def close(self, status: str) -> tuple[Stored, list[bytes]]:
        """Return the finished item and its closing events. `status`: completed or incomplete."""
        item = self._item(status)
        done = self._place.channel.event(
            "response.function_call_arguments.done",
            **self._where,
            name=self._name,
            arguments=item["arguments"],
        )
        return item, [done, *self._place.closed(item)]

    def _item(self, status: str) -> Stored:
        base = {
            "id": self._item_id,
            "object": "realtime.item",
            "type": "function_call",
            "status": status,
        }
        return {
            **base,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }


class Outputs:
    """Render all outputs of one response, one open at a time.

    `spoken` receives the spoken words, by item id.
    """

    def __init__(
        self,
        channel: Channel,
        conversation: Conversation | None,
        response_id: str,
        format: Format = PCM,
        spoken: dict[str, SpokenWords] | None = None,
    ):
        self._channel = channel
        self._conversation = conversation
        self._response_id = response_id
        self._format = format
        self._spoken = {} if spoken is None else spoken
        self._open: MessageOutput | SpeechOutput | CallOutput | None = None
        self._call_index = -1
        self.items: list[Stored] = []

    def text(self, text: str, events: list[bytes]) -> None:
        """Append the events of a piece of text to `events`."""
        message = self._open
        if type(message) is not MessageOutput:
            message = MessageOutput(self._place(events), new_id("item"))
            self._start(message, events)
        events.append(message.delta(text))

    def write(self, text: str, events: list[bytes]) -> None:
        """Add text to be spoken: opens the message; its words are sent with their audio."""
        message = self._open
        if not isinstance(message, SpeechOutput):
            item_id, place = new_id("item"), self._place(events)
            spoken = self._spoken[item_id] = SpokenWords()
            message = SpeechOutput(place, item_id, self._format, spoken)
            self._start(message, events)
        message.write(text)

    def sound(self, batch: list[Audio], events: list[bytes]) -> None:
        """Append the events of the audio of what was written."""
        if isinstance(self._open, SpeechOutput):
            events += self._open.sound(batch)

    def tool(self, piece: ToolCallDelta, events: list[bytes]) -> None:
        """Append the events of a piece of a tool call to `events`."""
        call = self._open
        if not isinstance(call, CallOutput) or piece.index != self._call_index:
            call = CallOutput(self._place(events), new_id("item"), piece)
            self._call_index = piece.index
            self._start(call, events)
        if piece.arguments:
            events.append(call.delta(piece.arguments))

    def finish(self, status: str, events: list[bytes]) -> None:
        """Close what is open. A response that completed without output gets an empty message."""
        if self._open is None and not self.items and status == "completed":
            self._start(MessageOutput(self._place(events), new_id("item")), events)
        self._close(status, events)

    @property
    def empty(self) -> bool:
        return self._open is None and not self.items

    def _place(self, events: list[bytes]) -> OutputPosition:
        """Return the position of the next output; closes the output that is still open."""
        self._close("completed", events)
        return OutputPosition(self._channel, self._conversation, self._response_id, len(self.items))

    def _start(
        self, output: MessageOutput | SpeechOutput | CallOutput, events: list[bytes]
    ) -> None:
        self._open = output
        events += output.open()

    def _close(self, status: str, events: list[bytes]) -> None:
        if self._open is not None:
            item, closing = self._open.close(status)
            self.items.append(item)
            events += closing
            self._open = None
