"""Put together the conversation that a response answers: stored responses, then its own input."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from motet_gateway.http.problems import NotFound
from motet_shared.errors import BadRequest, ContextTooLong

from . import items
from .messages import Placed
from .output.output import item_id
from .schema import ResponseBody
from .store import ResponseStore, StoredResponse

MAX_CHAIN = 512  # responses before a new one
_AT_A_TIME = 16  # responses that are read at a time
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{48})_i?\d+")
_PREVIOUS = "previous_response_id"
_ANSWERED = ("completed", "incomplete")
_Items = list[items.Item]


class PreviousResponseNotFound(NotFound):
    code = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the conversation that a response continues.

    `own`: its own input items, as they are stored. `chain`: ids of the responses before it.
    """

    placed: list[Placed]
    own: list[dict[str, Any]]
    chain: list[str]


async def conversation(
    store: ResponseStore | None, owner: str, body: ResponseBody, response_id: str, most: int
) -> Conversation:
    """Return the conversation of a new response.

    `most`: bytes that earlier responses may have together, and those that are referred to with the
    items of them. Raises BadRequest for a previous response that does not exist or has no answer,
    and for a reference to an item that does not exist; ContextTooLong beyond `most`, unless the
    conversation may be truncated.
    """
    earlier = _Earlier(store, owner, most)
    chain, before = [], _Items()
    if body.previous_response_id is not None:
        chain = await earlier.chain(body.previous_response_id)
        before = await _items_of(earlier, chain, most, truncate=body.truncation == "auto")
    own = [await _resolved(earlier, one) for one in _own(body)]
    placed = [Placed(item, _PREVIOUS) for item in before] + own
    return Conversation(
        placed, [_stored(one.item, response_id, n) for n, one in enumerate(own)], chain
    )


async def stored_conversation(
    store: ResponseStore, owner: str, record: StoredResponse, most: int, *, truncate: bool
) -> list[Placed]:
    """Return the conversation of a response that is stored already, as `conversation` had it."""
    earlier = _Earlier(store, owner, most)
    before = await _items_of(earlier, record.chain, most, truncate=truncate)
    own = msgspec.convert(await store.input_items(owner, record.id), _Items)
    placed = [Placed(item, _PREVIOUS) for item in before]
    return placed + [Placed(item, f"input[{index}]") for index, item in enumerate(own)]


def _own(body: ResponseBody) -> list[Placed]:
    if isinstance(body.input, str):
        message = items.InputMessage(role="user", content=body.input)
        return [Placed(message, "input")] if body.input else []
    return [Placed(item, f"input[{index}]") for index, item in enumerate(body.input)]


async def _resolved(earlier: _Earlier, placed: Placed) -> Placed:
    """Return an item, or the one that it refers to."""
    if not isinstance(placed.item, items.ItemReference):
        return placed
    item = await earlier.item(placed.item.id, f"{placed.param}.id")
    return Placed(item, placed.param)


def _stored(item: items.Item, response_id: str, number: int) -> dict[str, Any]:
    """Return an input item as it is stored and listed: with an id, and content in parts."""
    shape: dict[str, Any] = msgspec.to_builtins(item)
    kind = shape["type"]
    shape["id"] = item_id(response_id, kind, f"i{number}")
    if kind != "reasoning":
        shape.setdefault("status", "completed")
    if isinstance(item, items.InputMessage):
        if isinstance(item.content, str):
            is_reply = item.role == "assistant"
            part = {"type": "output_text" if is_reply else "input_text", "text": item.content}
            shape["content"] = [{**part, "annotations": []} if is_reply else part]
        for part in shape["content"]:
            if part["type"] == "input_image":
                part.setdefault("detail", "auto")
    return shape


# --------------------------------------------------------------------------------- stored responses
async def _items_of(
    earlier: _Earlier, chain: Sequence[str], most: int, *, truncate: bool
) -> _Items:
    """Return the items of a chain of responses, the oldest first, without outputs whose call is cut off.

    truncate: drop the oldest responses beyond `most` bytes; otherwise raises ContextTooLong.
    """
    found: list[_Items] = []
    size = 0
    newest_first = list(reversed(chain))
    for start in range(0, len(newest_first), _AT_A_TIME):
        ids = newest_first[start : start + _AT_A_TIME]
        for data in await asyncio.gather(*(earlier.both(one) for one in ids)):
            size += sum(map(len, data))
            if size > most:
                if truncate:
                    return _answered(found)
                raise ContextTooLong(
                    f"`{_PREVIOUS}`: the conversation has more than {most} bytes (--max-body); "
                    "begin a new one, or send `truncation: auto`",
                    param=_PREVIOUS,
                )
            found.append([item for part in data for item in msgspec.json.decode(part, type=_Items)])
    return _answered(found)


def _answered(newest_first: Sequence[_Items]) -> _Items:
    """Return items of responses, the oldest first, without outputs of tools whose call is not there."""
    calls: set[str] = set()
    found: _Items = []
    for item in (one for items_ in reversed(newest_first) for one in items_):
        if isinstance(item, items.FunctionCallItem | items.CustomToolCallItem):
            calls.add(item.call_id)
        outputs = items.FunctionCallOutput | items.CustomToolCallOutput
        if isinstance(item, outputs) and item.call_id not in calls:
            continue
        found.append(item)
    return found


class _Earlier:
    """Read stored responses of one tenant, each once.

    most: bytes of the responses that are referred to and of the items that are taken from them.
    """

    def __init__(self, store: ResponseStore | None, owner: str, most: int):
        self._store, self._owner, self._most = store, owner, most
        self._records: dict[str, StoredResponse] = {}
        self._shapes: dict[str, dict[str, bytes]] = {}  # of a response: its items by their ids
        self._referred = 0  # bytes

    async def chain(self, response_id: str) -> list[str]:
        """Return the ids of a conversation up to and with a response."""
        last = await self._record(response_id)
        if last.status not in _ANSWERED:
            message = f"`{_PREVIOUS}`: response {response_id!r} is {last.status}; wait until it is completed"
            raise BadRequest(message, param=_PREVIOUS)
        return [*last.chain, response_id][-MAX_CHAIN:]

    async def both(self, response_id: str) -> tuple[bytes, bytes]:
        """Return the input and the output items of a response, encoded."""
        record = await self._record(response_id)
        if self._store is None:
            raise _missing(response_id)
        try:
            given = await self._store.documents.get(self._owner, f"{response_id}.input")
        except NotFound:
            raise _missing(response_id) from None
        return given, msgspec.json.encode(record.resource["output"])

    async def item(self, name: str, param: str) -> items.Item:
        """Return an item by its id.

        Raises BadRequest, with `param`, if there is none; ContextTooLong beyond `most` bytes.
        """
        found = _ITEM_ID.fullmatch(name)
        known = await self._items(f"resp_{found[1]}", param) if found is not None else {}
        encoded = known.get(name)
        if encoded is None:
            message = f"`{param}` {name[:120]!r} does not exist; send the item"
            raise BadRequest(message, param=param)
        self._count(len(encoded), param)
        item: items.Item = msgspec.json.decode(encoded, type=items.Item)
        return item

    async def _items(self, response_id: str, param: str) -> dict[str, bytes]:
        """Return the items of a response by their ids, encoded; none if it does not exist."""
        if response_id not in self._shapes:
            try:
                parts = await self.both(response_id)
            except NotFound:
                parts = b"", b""
            self._count(sum(map(len, parts)), param)
            shapes = [one for part in parts if part for one in msgspec.json.decode(part)]
            encoded = {one["id"]: msgspec.json.encode(one) for one in shapes if "id" in one}
            self._shapes[response_id] = encoded
        return self._shapes[response_id]

    def _count(self, size: int, param: str) -> None:
        self._referred += size
        if self._referred > self._most:
            raise ContextTooLong(
                f"`{param}`: what the input refers to has more than {self._most} bytes (--max-body);"
                " refer to fewer items, or send them",
                param=param,
            )

    async def _record(self, response_id: str) -> StoredResponse:
        if response_id not in self._records:
            if self._store is None:
                raise _missing(response_id)
            try:
                self._records[response_id] = await self._store.get(self._owner, response_id)
            except NotFound:
                raise _missing(response_id) from None
        return self._records[response_id]


def _missing(response_id: str) -> PreviousResponseNotFound:
    message = f"`{_PREVIOUS}`: response {response_id[:80]!r} does not exist; it may have expired"
    return PreviousResponseNotFound(message, param=_PREVIOUS)
