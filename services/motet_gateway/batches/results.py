"""Record the answers of a batch in its output and error files, each line once.

A file that grows is a log: its next part can be created once only, so of two gateways that believe
to run the batch, the second one to write fails. What was answered is read from the parts, which are
the only record: a line counts as answered once its part is stored. A part ends with a whole line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from motet_gateway.files.store import PART, FileStore, StoredFile, part_name
from motet_gateway.http.problems import NotFound
from motet_shared.errors import MotetError


class LeaseLost(MotetError):
    """Signal that another gateway runs the batch."""

    code = "lease_lost"
    retryable = True


class _Answered(Struct):
    custom_id: str | None = None


_answered = msgspec.json.Decoder(_Answered).decode


class ResultFile:
    """Append lines to the output or error file of a batch; its id is known beforehand."""

    def __init__(self, files: FileStore, owner: str, file_id: str):
        self._files, self._owner, self._id = files, owner, file_id
        self._parts = self._bytes = 0
        self._pending: list[bytes] = []
        self.pending_bytes = 0
        self.count = 0  # lines that are stored

    async def answered(self) -> list[str]:
        """Return the custom ids of the lines that were stored before; call it first, once."""
        found: list[str] = []
        while True:
            try:
                name = part_name(self._id, self._parts)
                part = await self._files.documents.get(self._owner, name)
            except NotFound:
                return found
            found += [_answered(line).custom_id or "" for line in part.splitlines()]
            self._parts += 1
            self._bytes += len(part)
            self.count = len(found)

    def add(self, line: bytes) -> None:
        """Append a line, which `flush` stores."""
        self._pending.append(line)
        self.pending_bytes += len(line) + 1

    async def flush(self) -> None:
        """Store the lines that were added since.

        Raises LeaseLost if another gateway has stored some, QuotaExceeded if the tenant has no room
        left, Unavailable if the store is away; the lines then remain to be stored.
        """
        while self._pending:
            taken = list(self._next_part())
            part = b"".join(line + b"\n" for line in taken)
            await self._files.check_room(self._owner, len(part))
            name = part_name(self._id, self._parts)
            if not await self._files.documents.create(self._owner, name, part):
                raise LeaseLost("another gateway runs this batch")
            self._parts += 1
            self._bytes += len(part)
            self.count += len(taken)
            self.pending_bytes -= len(part)
            del self._pending[: len(taken)]

    def _next_part(self) -> Iterator[bytes]:
        """Yield the lines of the next part: one, and others as far as they fit."""
        size = 0
        for line in self._pending:
            size += len(line) + 1
            if size - len(line) - 1 > 0 and size > PART:
                return
            yield line

    async def close(self, filename: str, ttl: int) -> bool:
        """Make the lines a file that its tenant can read, if there are any; `ttl` in seconds."""
        if not self._parts:
            return False
        now = int(time.time())
        file = StoredFile(
            id=self._id,
            bytes=self._bytes,
            parts=self._parts,
            created_at=now,
            filename=filename,
            purpose="batch_output",
            expires_at=now + min(ttl or int(self._files.ttl), int(self._files.ttl)),
        )
        await self._files.save(self._owner, file)
        return True
