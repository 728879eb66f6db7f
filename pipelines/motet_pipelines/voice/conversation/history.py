"""Keep the items of a conversation in order, and convert them to chat messages."""

from __future__ import annotations

from typing import Any

import msgspec

from motet_pipelines import draws
from motet_shared.errors import BadRequest, PayloadTooLarge

from .user_sound import SOUND, chat_parts

Item = dict[str, Any]  # in the form of the realtime API: message, function_call or its output

IMAGE = "input_image"  # type of the parts of a message that are images
MAX_ITEMS = 4096
_NEXT = ""  # stands for the item that will be inserted next


class DuplicateItem(BadRequest):
    code = "item_create_duplicate_item_id"


class UnknownItem(BadRequest):
    """Refuse an operation on an item that does not exist.

    The error code names the operation; clients tell harmless races from faults by it.
    """

    def __init__(self, item_id: str, use: str):
        super().__init__(f"there is no item {item_id!r} in the conversation", param="item_id")
        self.code = f"item_{use}_invalid_item_id"


class HistoryState(msgspec.Struct, frozen=True):
    """Items in their order, with their sound; first: the id of the first one that replies see."""

    items: list[Item]
    first: str | None


class History:
    """Keep items by id and in order, bounded in number and bytes."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._order: list[str] = []
        self._items: dict[str, Item] = {}
        self._first: str | None = None  # id of the first item that replies see; None: all
        self._bytes = 0

    @property
    def last_id(self) -> str | None:
        """Return the id of the last item, None without any."""
        return self._order[-1] if self._order else None

    def state(self) -> HistoryState:
        return HistoryState(self.items(), self._first)

    def restore(self, state: HistoryState) -> None:
        self._items = {item["id"]: item for item in state.items}
        self._order, self._first = list(self._items), state.first
        self._bytes = sum(map(_size, state.items))

    def items(self) -> list[Item]:
        return [self._items[item_id] for item_id in self._order]

    def shown(self) -> list[Item]:
        """Return the items that replies see: without turns that were dropped."""
        place = self._place
        early = [self._items[item_id] for item_id in self._order[:place]]
        return [item for item in early if item.get("role") == "system"] + self.items()[place:]

    @property
    def _place(self) -> int:
        """Return the place of the first item that replies see; behind the last one: none."""
        if self._first is None:
            return 0
        return self._order.index(self._first) if self._first in self._items else len(self._order)

    def _drop_before(self, item_id: str) -> None:
        """Have replies see nothing before an item, which may be the next one."""
        if item_id not in self._items or self._order.index(item_id) > self._place:
            self._first = item_id

    def keep_turns(self, turns: int) -> None:
        """Limit what replies see to the last `turns` turns, each from a message of the user on.

        Does nothing for 0, or for more turns than there are.
        """
        users = [item["id"] for item in self.items() if item.get("role") == "user"]
        if 0 < turns <= len(users):
            self._drop_before(users[-turns])

    def get(self, item_id: str, use: str = "retrieve") -> Item:
        """Return an item. Raises UnknownItem, whose code names `use`, if it does not exist."""
        item = self._items.get(item_id)
        if item is None:
            raise UnknownItem(item_id, use)
        return item

    def insert(self, item: Item, after: str | None = None, *, bounded: bool = True) -> str | None:
        """Insert `item` after the item `after` ("root": first; None: last).

        bounded: False for the items of a reply, which is bounded by its model's context.

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
        if bounded:
            self.check_room("item", size)
        self._bytes += size
        place = (
            len(self._order)
            if after is None
            else 0
            if after == "root"
            else self._order.index(after) + 1
        )
        if self._first is not None and self._first not in self._items and place == len(self._order):
            self._first = item["id"]
        self._order.insert(place, item["id"])
        self._items[item["id"]] = item
        return self._order[place - 1] if place else None

    def check_room(self, param: str, size: int = 0) -> None:
        """Raise PayloadTooLarge, naming `param`, unless an item of `size` bytes fits."""
        if not self._has_room(size):
            raise PayloadTooLarge(
                f"the conversation is full ({len(self._order)} items, {self._bytes} bytes);"
                " delete items first",
                param=param,
            )

    def _has_room(self, size: int) -> bool:
        return len(self._order) < MAX_ITEMS and self._bytes + size <= self._max_bytes

    def make_room(self, item: Item) -> None:
        """Forget the sound of the oldest turns until `item` fits; replies see these no longer."""
        users = [kept for kept in self.items() if kept.get("role") == "user"]
        for number, old in enumerate(users, 1):
            if self._bytes + _size(item) <= self._max_bytes:
                return
            before = _size(old)
            if any([part.pop(SOUND, None) for part in old["content"]]):
                self._bytes += _size(old) - before
                self._drop_before(users[number]["id"] if number < len(users) else item["id"])

    def drop_oldest(self, item: Item) -> list[Item]:
        """Delete the oldest items until `item` fits; return them."""
        dropped: list[Item] = []
        while self._order and not self._has_room(_size(item)):
            dropped.append(self._items[self._order[0]])
            self.delete(self._order[0])
        return dropped

    def delete(self, item_id: str) -> None:
        """Delete an item. Raises UnknownItem if it does not exist."""
        self._bytes -= _size(self.get(item_id, "delete"))
        if item_id == self._first:
            behind = self._order.index(item_id) + 1
            self._first = self._order[behind] if behind < len(self._order) else _NEXT
        del self._items[item_id]
        self._order.remove(item_id)

    def replace(self, item: Item) -> str | None:
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

    def set_transcript(self, item: Item, index: int, transcript: str) -> None:
        """Set the transcript of a spoken part, in place: every list that holds the item sees it."""
        before = _size(item)
        item["content"][index]["transcript"] = transcript
        if self._items.get(item["id"]) is item:
            self._bytes += _size(item) - before

    def check_output(self, item: Item) -> None:
        """Raise BadRequest for a function result without its call: a model cannot read one."""
        if item["type"] == "function_call_output" and not self._has_call(item["call_id"]):
            message = f"no function_call has the call_id {item['call_id']!r}"
            raise BadRequest(message, param="item.call_id")

    def _has_call(self, call_id: str) -> bool:
        return any(
            item["type"] == "function_call" and item["call_id"] == call_id
            for item in self._items.values()
        )


def chat_messages(instructions: str, items: list[Item]) -> list[dict[str, Any]]:
    """Return items as chat messages.

    Function calls that follow one another, or a text, join one message of the assistant. A call
    that a reply did not complete is left out with its result: its arguments may be no JSON.
    """
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": instructions}] if instructions else []
    )
    given = [item for item in items if item["type"] == "function_call"]
    whole = {call["call_id"] for call in given if not _is_cut(call)}
    cut = {call["call_id"] for call in given} - whole
    for item in items:
        if _is_cut(item) or item.get("call_id") in cut:
            continue
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


def _is_cut(item: Item) -> bool:
    """Return True for a function call in which its reply ended, or that still grows."""
    return item["type"] == "function_call" and item.get("status") in ("incomplete", "in_progress")


def _chat_content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts joined by newlines; with images, parts in order.

    Images are {"type": "image"} parts with URL and detail; with sound, `user_sound` has its parts.
    """
    if not any(part["type"] == IMAGE or SOUND in part for part in parts):
        return "\n".join(map(_words, parts))
    return [shown for part in parts for shown in _chat_parts(part)]


def _chat_parts(part: dict[str, Any]) -> list[dict[str, Any]]:
    if part["type"] == IMAGE:
        return [{"type": "image", "image_url": part["image_url"], "detail": part["detail"]}]
    return chat_parts(part) if SOUND in part else [{"type": "text", "text": _words(part)}]


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


def without_sound(item: Item) -> Item:
    """Return an item without its recordings."""
    if not any(SOUND in part for part in item.get("content", ())):
        return item
    content = [{k: v for k, v in part.items() if k != SOUND} for part in item["content"]]
    return {**item, "content": content}


def new_id(kind: str, name: str = "") -> str:
    """Return a new id; `name` as in `draws.token_hex`."""
    return f"{kind}_{draws.token_hex(10, name and f'{kind} {name}')}"


def user_audio_item(item_id: str) -> Item:
    """Return a spoken user item whose words are not known yet."""
    content = [{"type": "input_audio", "transcript": None}]
    base = {"id": item_id, "object": "realtime.item", "type": "message", "status": "completed"}
    return {**base, "role": "user", "content": content}


def _size(item: Item) -> int:
    """Return the bytes of an item: of JSON, and of its sound."""
    sounds = [part.get(SOUND, ()) for part in item.get("content", ())]
    if not any(sounds):
        return len(msgspec.json.encode(item))
    return sum(len(file) for files in sounds for file in files) + len(
        msgspec.json.encode(without_sound(item))
    )
