"""Keep files of tenants: a record, and the bytes in parts that are written and read one by one.

A file never is in memory as a whole. Its id begins with the time, so that names sort by age.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import NotFound, QuotaExceeded
from motet_gateway.storage.documents import SMALL, Documents
from motet_gateway.storage.quota import Stored
from motet_gateway.storage.records import missing, read_record

SCHEMA = 1  # version of what is stored; increase it with a change that older versions cannot read
PART = SMALL  # bytes of a part
MOST = 10_000  # files of a tenant
_AT_ONCE = 32  # records that are read concurrently
_ID = re.compile(r"file-[0-9a-f]{24}")


class StoredFile(Struct, kw_only=True, omit_defaults=True):
    """A file as it is stored; `bytes` is its size, times are Unix seconds."""

    version: int = SCHEMA
    id: str
    bytes: int
    parts: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


_record = msgspec.json.Decoder(StoredFile).decode

_TIME, _CHANCE = 11, 13  # digits of an id


def new_id(prefix: str) -> str:
    """Return an id that sorts behind those made before, by the millisecond."""
    return f"{prefix}{time.time_ns() // 1_000_000:0{_TIME}x}{secrets.token_hex(7)[:_CHANCE]}"


def created_at(new: str) -> float:
    """Return the Unix time in seconds at which `new_id` made an id."""
    return int(new[-_TIME - _CHANCE : -_CHANCE], 16) / 1000


class FileStore:
    """Keep the files of all tenants, for `ttl` seconds at most.

    Every method raises Unavailable if the store is away.
    """

    def __init__(self, documents: Documents, stored: Stored, ttl: float):
        self.documents, self._stored, self.ttl = documents, stored, ttl
        stored.meters.append(documents.used)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def turn(self, owner: str) -> asyncio.Lock:
        """Return the lock that a tenant's requests hold from the check for room to the end of `write`."""
        return self._turns.setdefault(owner, asyncio.Lock())

    # ---------------------------------------------------------------------------------- writing
    async def check_room(self, owner: str, size: int) -> None:
        """Raise QuotaExceeded unless the tenant may store `size` more bytes.

        Files that have expired are deleted first, if it makes a difference.
        """
        try:
            await self._stored.check(owner, size, "file")
        except QuotaExceeded:
            if not await self._delete_expired(owner):
                raise
            await self._stored.check(owner, size, "file")

    async def check_count(self, owner: str) -> None:
        """Raise QuotaExceeded if the tenant has as many files as it may have."""
        if len(await self.documents.names(owner, "files")) < MOST:
            return
        if not await self._delete_expired(owner):
            message = f"this key has stored {MOST} files, the most allowed; delete some"
            raise QuotaExceeded(message, param="file")

    async def write(self, owner: str, file: StoredFile, parts: AsyncIterable[bytes]) -> StoredFile:
        """Store a file, whose size and number of parts are those of `parts`."""
        file.bytes = file.parts = 0
        try:
            async for part in parts:
                await self.documents.put(owner, part_name(file.id, file.parts), part)
                file.parts += 1
                file.bytes += len(part)
            await self.save(owner, file)
        except BaseException:
            await asyncio.shield(self._delete_parts(owner, file.id))
            raise
        return file

    async def save(self, owner: str, file: StoredFile) -> None:
        """Store the record of a file whose parts are stored."""
        await self.documents.put(owner, f"files.{file.id}", msgspec.json.encode(file))

    # ---------------------------------------------------------------------------------- reading
    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Return the record of a file. Raises NotFound if this tenant has none of that id."""
        what = f"file {file_id[:80]!r}"
        if not _ID.fullmatch(file_id):
            raise missing(what)
        file = await read_record(
            self.documents, owner, f"files.{file_id}", _record, what=what, schema=SCHEMA
        )
        if file.expires_at <= time.time():
            await self.delete(owner, file)
            raise missing(what)
        return file

    async def read(
        self, owner: str, file: StoredFile, first: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a file, from number `first`."""
        for number in range(first, file.parts):
            yield await self.documents.get(owner, part_name(file.id, number))

    async def ids(self, owner: str) -> list[str]:
        """Return the ids of a tenant's files, the oldest first."""
        names = await self.documents.names(owner, "files")
        return [name.removeprefix("files.") for name in names]

    async def found(self, owner: str, ids: Sequence[str]) -> list[StoredFile]:
        """Return the records of those files that still exist."""
        files: list[StoredFile] = []
        for start in range(0, len(ids), _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            files += await asyncio.gather(*(self._if_there(owner, one) for one in some))  # type: ignore[arg-type]
        return [file for file in files if file is not None]

    async def _if_there(self, owner: str, file_id: str) -> StoredFile | None:
        try:
            return await self.get(owner, file_id)
        except NotFound:
            return None

    # --------------------------------------------------------------------------------- deleting
    async def delete(self, owner: str, file: StoredFile) -> None:
        await self.documents.delete(owner, f"files.{file.id}")
        await self._delete_parts(owner, file.id)

    async def _delete_parts(self, owner: str, file_id: str) -> None:
        for name in await self.documents.names(owner, f"parts.{file_id}"):
            await self.documents.delete(owner, name)

    async def _delete_expired(self, owner: str) -> bool:
        """Delete the files that have expired; return True if there were any."""
        ids = await self.ids(owner)
        return len(await self.found(owner, ids)) < len(ids)


def part_name(file_id: str, number: int) -> str:
    """Return the name of a part's document."""
    return f"parts.{file_id}.{number:06}"
