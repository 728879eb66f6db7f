"""Keep the items of a conversation in order, and convert them to chat messages."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from motet_shared.errors import BadRequest, PayloadTooLarge

from .events import IMAGE, ContentPart, FunctionCallItem, FunctionCallOutputItem, Item, MessageItem

Stored = dict[str, Any]  # an item as clients see it

MAX_ITEMS = 4096


class DuplicateItem(BadRequest):
    code = "item_create_duplicate_item_id"


class UnknownItem(BadRequest):
    """Refuse an operation on an item that does not exist.

    The error code names the operation; clients tell harmless races from faults by it.
    """

    def __init__(self, item_id: str, use: str):
        super().__init__(f"there is no item {item_id!r} in the conversation", param="item_id")
        self.code = f"item_{use}_invalid_item_id"


class Conversation:
    """Keep items by id and in order.

    Bounded in number and bytes: a socket may stay open for days.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._order: list[str] = []
        self._items: dict[str, Stored] = {}
        self._bytes = 0

    def items(self) -> list[Stored]:
        return [self._items[item_id] for item_id in self._order]

    def get(self, item_id: str, use: str = "retrieve") -> Stored:
        """Return an item. Raises UnknownItem, whose code names `use`, if it does not exist."""
        item = self._items.get(item_id)
        if item is None:
            raise UnknownItem(item_id, use)
        return item

    def insert(self, item: Stored, after: str | None = None) -> str | None:
        """Insert `item` after the item `after` ("root": first; None: last).

        Returns the id of the item before it, None if it is first. Raises DuplicateItem for an id
        that is taken, BadRequest if `after` does not exist and PayloadTooLarge if the conversation
        is full.
        """
        if item["id"] in self._items:
            raise DuplicateItem(
                f"item id {item['id']!r} is taken; ids are unique in a conversation",
                param="item.id",
            )
        if after not in (None, "root") and after not in self._items:
            raise BadRequest(
                f"there is no item {after!r} to insert after", param="previous_item_id"
            )
        size = _size(item)
        if len(self._order) >= MAX_ITEMS or self._bytes + size > self._max_bytes:
            message = f"the conversation is full ({len(self._order)} items, {self._bytes} bytes); delete items first"
            raise PayloadTooLarge(message, param="item")
        self._bytes += size
        place = (
            len(self._order)
            if after is None
            else 0
            if after == "root"
            else self._order.index(after) + 1
        )
        self._order.insert(place, item["id"])
        self._items[item["id"]] = item
        return self._order[place - 1] if place else None

    def delete(self, item_id: str) -> None:
        """Delete an item. Raises UnknownItem if it does not exist."""
        self._bytes -= _size(self.get(item_id, "delete"))
        del self._items[item_id]
        self._order.remove(item_id)

    def replace(self, item: Stored) -> str | None:
        """Complete a reply that was inserted empty, unless it has been deleted since.

        Returns the id of the item before it. A reply is bounded by its model's context, so it is
        never refused here.
        """
        if item["id"] not in self._items:
            return None
        self._bytes += _size(item) - _size(self._items[item["id"]])
        self._items[item["id"]] = item
        place = self._order.index(item["id"])
        return self._order[place - 1] if place else None

    def understand(self, item: Stored, index: int, transcript: str) -> None:
        """Set the transcript of a spoken part, in place: every list that holds the item sees it."""
        before = _size(item)
        item["content"][index]["transcript"] = transcript
        if self._items.get(item["id"]) is item:
            self._bytes += _size(item) - before

    def has_call(self, call_id: str) -> bool:
        return any(
            item["type"] == "function_call" and item["call_id"] == call_id
            for item in self._items.values()
        )


def stored(item: Item, new_id: str, new_call_id: str) -> Stored:
    """Return a client's item as the conversation keeps it, with ids filled in."""
    base = {"id": item.id or new_id, "object": "realtime.item", "type": "", "status": "completed"}
    if isinstance(item, MessageItem):
        content = [_stored_part(part) for part in item.content]
        return {**base, "type": "message", "role": item.role, "content": content}
    if isinstance(item, FunctionCallItem):
        call_id = item.call_id or new_call_id
        return {
            **base,
            "type": "function_call",
            "call_id": call_id,
            "name": item.name,
            "arguments": item.arguments,
        }
    return {**base, "type": "function_call_output", "call_id": item.call_id, "output": item.output}


def _stored_part(part: ContentPart) -> dict[str, Any]:
    """Return a part as it is kept: audio as its transcript alone, images with their URL."""
    if part.type == IMAGE:
        return {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
    spoken = part.type in ("input_audio", "output_audio")
    return {
        "type": part.type,
        **({"transcript": part.transcript} if spoken else {"text": part.text}),
    }


def check_output(item: Item, conversation: Conversation) -> None:
    """Raise BadRequest for a function result without its call: a model cannot read one alone."""
    if isinstance(item, FunctionCallOutputItem) and not conversation.has_call(item.call_id):
        raise BadRequest(f"no function_call has the call_id {item.call_id!r}", param="item.call_id")


def chat_messages(instructions: str, items: list[Stored]) -> list[dict[str, Any]]:
    """Return items as chat messages.

    Function calls that follow one another, or a text, join one message of the assistant.
    """
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": instructions}] if instructions else []
    )
    for item in items:
        if item["type"] == "message":
            messages.append({"role": item["role"], "content": _chat_content(item["content"])})
        elif item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        else:
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            )
    return messages


def _chat_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts joined by newlines; with images, parts in order.

    Images are {"type": "image"} parts with URL and detail.
    """
    if not any(part["type"] == IMAGE for part in parts):
        return "\n".join(map(_words, parts))
    return [
        {"type": "image", "image_url": part["image_url"], "detail": part["detail"]}
        if part["type"] == IMAGE
        else {"type": "text", "text": _words(part)}
        for part in parts
    ]


def _words(part: dict[str, Any]) -> str:
    return part.get("text") or part.get("transcript") or ""


def without_oldest(messages: list[dict[str, Any]], turns: int) -> list[dict[str, Any]] | None:
    """Return `messages` without the first `turns` turns, None if there is no turn to drop.

    Instructions and the last message stay. A turn is cut before a user message, so that no tool
    result loses its call.
    """
    first = 1 if messages and messages[0]["role"] == "system" else 0
    starts = [
        index for index in range(first + 1, len(messages)) if messages[index]["role"] == "user"
    ]
    if not starts:
        return None
    return messages[:first] + messages[starts[min(turns, len(starts)) - 1] :]


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(10)}"


def _size(item: Stored) -> int:
    return len(msgspec.json.encode(item))
