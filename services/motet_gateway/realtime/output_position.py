"""Place an output in its response, with the events that announce and complete it there."""

from __future__ import annotations

from dataclasses import dataclass

from .channel import Channel
from .conversation import Conversation, Stored


@dataclass(slots=True)
class OutputPosition:
    """Position of an output: its response, and its conversation (None: out of band)."""

    channel: Channel
    conversation: Conversation | None
    response_id: str
    output_index: int

    def opened(self, item: Stored) -> list[bytes]:
        """Announce a new item, and store a copy that `closed` completes."""
        add = self.channel.event
        events = [
            add(
                "response.output_item.added",
                response_id=self.response_id,
                output_index=self.output_index,
                item=item,
            )
        ]
        if self.conversation is not None:
            before = self.conversation.insert(item)
            events.append(add("conversation.item.added", previous_item_id=before, item=item))
        return events

    def closed(self, item: Stored) -> list[bytes]:
        add = self.channel.event
        events = []
        if self.conversation is not None:
            before = self.conversation.replace(item)
            events.append(add("conversation.item.done", previous_item_id=before, item=item))
        events.append(
            add(
                "response.output_item.done",
                response_id=self.response_id,
                output_index=self.output_index,
                item=item,
            )
        )
        return events
