"""Keep responses of tenants: the response, its input, and what is known of one that still runs.

A response is a few documents, whose names begin with its id. A client that chains responses names
the last one only, so each knows the ids of all before it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import NotFound
from motet_gateway.storage.documents import Documents
from motet_gateway.storage.quota import Stored
from motet_gateway.storage.records import read_record
from motet_shared.errors import Unavailable
from motet_shared.messages import TargetText, Text

from .schema import ResponseBody

SCHEMA = 1  # version of what is stored; increase it with a change that older versions cannot read
_ID = re.compile(r"resp_[0-9a-f]{48}")
_RETRY = 0.2  # seconds between two attempts to store


class Stop(Enum):
    """Enumerate why a response in the background ends early."""

    CANCELLED = b"cancelled"
    DELETED = b"deleted"


class StoredResponse(Struct, kw_only=True, omit_defaults=True):
    """A response as it is stored.

    `chain`: ids of the responses before it, the oldest first. `body`: of a response that runs in
    the background, what the client sent, without the input; `seed` and `request_id` belong to it.
    """

    version: int = SCHEMA
    resource: dict[str, Any]
    chain: list[str] = []
    body: dict[str, Any] | None = None
    seed: int = 0
    request_id: str = ""

    @property
    def asked(self) -> ResponseBody:
        """Return what the client of a response in the background sent. Raises ValidationError."""
        return msgspec.convert(self.body, ResponseBody, str_keys=True)  # JSON has no other keys

    @property
    def id(self) -> str:
        return str(self.resource["id"])

    @property
    def status(self) -> str:
        return str(self.resource["status"])


def job_of(owner: str, response_id: str) -> str:
    """Return the name under which a response is queued: its tenant, a dot, its id."""
    return f"{owner}.{response_id}"


class Log(Struct, array_like=True):
    """A part of what a running response has said so far."""

    texts: list[Text | TargetText]


_record = msgspec.json.Decoder(StoredResponse).decode
_log = msgspec.msgpack.Decoder(Log).decode


class ResponseStore:
    """Keep the responses of all tenants. Every method raises Unavailable if the store is away."""

    def __init__(self, documents: Documents, stored: Stored):
        self.documents = documents
        self._stored = stored
        stored.meters.append(documents.used)

    async def check_room(self, owner: str, size: int) -> None:
        """Raise QuotaExceeded unless the tenant may store `size` more bytes."""
        await self._stored.check(owner, size, "store")

    async def get(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises NotFound if this tenant has none of that id."""
        if not _ID.fullmatch(response_id):
            raise NotFound(f"response {response_id[:80]!r} does not exist")
        what = f"response {response_id!r}"
        return await read_record(
            self.documents, owner, response_id, _record, what=what, schema=SCHEMA
        )

    async def known(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response, None if this tenant has none of that id."""
        try:
            return await self.get(owner, response_id)
        except NotFound:
            return None

    async def create(self, owner: str, record: StoredResponse, items: list[Any]) -> None:
        """Store a new response with its input items."""
        await self.documents.put(owner, f"{record.id}.input", msgspec.json.encode(items))
        await self.save(owner, record)

    async def save(self, owner: str, record: StoredResponse) -> None:
        """Store a response in place of what is known of it."""
        await self.documents.put(owner, record.id, msgspec.json.encode(record))

    async def finish(
        self, owner: str, record: StoredResponse, items: list[Any] | None, patience: float
    ) -> None:
        """Store a finished response, with its input items if they are not stored yet.

        An attempt that fails is repeated for `patience` seconds: NATS may be restarting.
        """
        end = time.monotonic() + patience
        while True:
            try:
                if items is not None:
                    await self.create(owner, record, items)
                else:
                    await self.save(owner, record)
                return
            except Unavailable:
                if time.monotonic() >= end:
                    raise
                await asyncio.sleep(_RETRY)

    async def input_items(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """Return the input items of a response. Raises NotFound if there is no such response."""
        items: list[dict[str, Any]] = msgspec.json.decode(
            await self.documents.get(owner, f"{response_id}.input")
        )
        return items

    async def delete(self, owner: str, record: StoredResponse) -> None:
        """Delete a response; one that runs in the background is stopped."""
        if record.body is not None and record.status in ("queued", "in_progress"):
            await self.documents.put(owner, f"{record.id}.stop", Stop.DELETED.value)
        await self.documents.delete(owner, record.id)
        await self.documents.delete(owner, f"{record.id}.input")
        if record.body is not None:
            await self.delete_log(owner, record.id)

    # ------------------------------------------------------------------------- in the background
    async def stop(self, owner: str, response_id: str) -> None:
        """Ask the gateway that runs a response to end it."""
        await self.documents.put(owner, f"{response_id}.stop", Stop.CANCELLED.value)

    async def stop_of(self, owner: str, response_id: str) -> Stop | None:
        """Return why a running response shall end, None if it shall not."""
        try:
            return Stop(await self.documents.get(owner, f"{response_id}.stop"))
        except NotFound:
            return None

    async def append(self, owner: str, response_id: str, part: int, texts: Sequence[Text]) -> None:
        """Store what a running response has said since the last part; parts count from 0."""
        data = msgspec.msgpack.encode(Log([*texts]))
        await self.documents.put(owner, f"{response_id}.log.{part}", data)

    async def log(self, owner: str, response_id: str, part: int) -> Sequence[Text] | None:
        """Return a part of what a running response has said, None if there is none yet."""
        try:
            return _log(await self.documents.get(owner, f"{response_id}.log.{part}")).texts
        except NotFound:
            return None

    async def delete_log(self, owner: str, response_id: str) -> None:
        """Delete all parts of a log, also those behind one that is deleted already."""
        for name in await self.documents.names(owner, f"{response_id}.log"):
            await self.documents.delete(owner, name)
