"""The items of a conversation, in order, and the chat messages that they amount to."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from motet_shared.errors import BadRequest, PayloadTooLarge

from .events import ContentPart, FunctionCallItem, FunctionCallOutputItem, Item, MessageItem

Stored = dict[str, Any]  # an item as clients see it

MAX_ITEMS = 4096


class DuplicateItem(BadRequest):
    code = "item_create_duplicate_item_id"


class UnknownItem(BadRequest):
    """Clients tell such races from faults by the code, which names what was to be done with the item."""

    def __init__(self, item_id: str, use: str):
        super().__init__(f"there is no item {item_id!r} in the conversation", param="item_id")
        self.code = f"item_{use}_invalid_item_id"


class Conversation:
    """Items by id and in order. Bounded in number and bytes: a socket may stay open for days."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._order: list[str] = []
        self._items: dict[str, Stored] = {}
        self._bytes = 0

    def items(self) -> list[Stored]:
        return [self._items[item_id] for item_id in self._order]

    def get(self, item_id: str, use: str = "retrieve") -> Stored:
        """The item; UnknownItem if there is none of that id to `use`."""
        item = self._items.get(item_id)
        if item is None:
            raise UnknownItem(item_id, use)
        return item

    def insert(self, item: Stored, after: str | None = None) -> str | None:
        """Put `item` after the item `after` ("root": first; None: last). Returns the id of the item before it."""
        if item["id"] in self._items:
            raise DuplicateItem(f"item id {item['id']!r} is taken; ids are unique in a conversation", param="item.id")
        if after not in (None, "root") and after not in self._items:
            raise BadRequest(f"there is no item {after!r} to insert after", param="previous_item_id")
        size = _size(item)
        if len(self._order) >= MAX_ITEMS or self._bytes + size > self._max_bytes:
            message = f"the conversation is full ({len(self._order)} items, {self._bytes} bytes); delete items first"
            raise PayloadTooLarge(message, param="item")
        self._bytes += size
        place = len(self._order) if after is None else 0 if after == "root" else self._order.index(after) + 1
        self._order.insert(place, item["id"])
        self._items[item["id"]] = item
        return self._order[place - 1] if place else None

    def delete(self, item_id: str) -> None:
        """UnknownItem if there is no such item."""
        self._bytes -= _size(self.get(item_id, "delete"))
        del self._items[item_id]
        self._order.remove(item_id)

    def replace(self, item: Stored) -> str | None:
        """Complete a reply that was inserted while it was empty, unless it was deleted meanwhile. Returns the id of
        the item before it. A reply is bounded by its model's context, so it is never refused here."""
        if item["id"] not in self._items:
            return None
        self._bytes += _size(item) - _size(self._items[item["id"]])
        self._items[item["id"]] = item
        place = self._order.index(item["id"])
        return self._order[place - 1] if place else None

    def understand(self, item: Stored, index: int, transcript: str) -> None:
        """The words of a spoken part are known; every list that holds the item sees them."""
        before = _size(item)
        item["content"][index]["transcript"] = transcript
        if self._items.get(item["id"]) is item:
            self._bytes += _size(item) - before

    def has_call(self, call_id: str) -> bool:
        return any(item["type"] == "function_call" and item["call_id"] == call_id for item in self._items.values())


def stored(item: Item, new_id: str, new_call_id: str) -> Stored:
    """A client's item as the conversation keeps it, with ids filled in."""
    base = {"id": item.id or new_id, "object": "realtime.item", "type": "", "status": "completed"}
    if isinstance(item, MessageItem):
        content = [_stored_part(part) for part in item.content]
        return {**base, "type": "message", "role": item.role, "content": content}
    if isinstance(item, FunctionCallItem):
        call_id = item.call_id or new_call_id
        return {**base, "type": "function_call", "call_id": call_id, "name": item.name, "arguments": item.arguments}
    return {**base, "type": "function_call_output", "call_id": item.call_id, "output": item.output}


def _stored_part(part: ContentPart) -> dict[str, Any]:
    """Sound is not kept: its words are."""
    spoken = part.type in ("input_audio", "output_audio")
    return {"type": part.type, **({"transcript": part.transcript} if spoken else {"text": part.text})}


def check_output(item: Item, conversation: Conversation) -> None:
    """The result of a call needs its call: a model cannot read one without the other."""
    if isinstance(item, FunctionCallOutputItem) and not conversation.has_call(item.call_id):
        raise BadRequest(f"no function_call has the call_id {item.call_id!r}", param="item.call_id")


def chat_messages(instructions: str, items: list[Stored]) -> list[dict[str, Any]]:
    """Items as chat messages. Calls that follow one another, or a text, are one message of the assistant."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        if item["type"] == "message":
            text = "\n".join(part.get("text") or part.get("transcript") or "" for part in item["content"])
            messages.append({"role": item["role"], "content": text})
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def without_oldest(messages: list[dict[str, Any]], turns: int) -> list[dict[str, Any]] | None:
    """`messages` without the first `turns` turns; instructions stay, so does the last message. None: nothing to drop.

    A turn is cut before a user message, so that no tool result loses its call.
    """
    first = 1 if messages and messages[0]["role"] == "system" else 0
    starts = [index for index in range(first + 1, len(messages)) if messages[index]["role"] == "user"]
    if not starts:
        return None
    return messages[:first] + messages[starts[min(turns, len(starts)) - 1] :]


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(10)}"


def _size(item: Stored) -> int:
    return len(msgspec.json.encode(item))
