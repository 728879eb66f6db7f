"""Keep batches of tenants: OpenAI's batch object, and what the server needs to run it."""

from __future__ import annotations

import re
import time
from typing import Any, Literal

import msgspec
from msgspec import Struct

from motet_gateway.files.store import new_id
from motet_gateway.http.problems import NotFound
from motet_gateway.storage.documents import Documents
from motet_gateway.storage.records import missing, read_record

SCHEMA = 1  # version of what is stored; increase it with a change that older versions cannot read
MOST = 10_000  # batches of a tenant
_ID = re.compile(r"batch_[0-9a-f]{24}")

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
OVER: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


class LineError(Struct):
    """An error of the input file; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(Struct):
    """Count the requests of a batch, those answered, and those failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, kw_only=True, omit_defaults=True):
    """A batch as it is stored. `at` has the time of each status in Unix seconds.

    `output` and `error` are ids of files that exist once the batch is over and something is in them.
    """

    version: int = SCHEMA
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: int
    status: Status = "validating"
    at: dict[str, int] = {}
    errors: list[LineError] = []
    counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None
    output: str
    error: str
    has_output: bool = False
    has_error: bool = False
    output_ttl: int = 0  # seconds that the result is kept; 0: as long as any file

    @classmethod
    def new(cls, **fields: Any) -> Batch:
        """Return a batch that is created now, with ids of its own."""
        return cls(
            id=new_id("batch_"),
            output=new_id("file-"),
            error=new_id("file-"),
            at={"created": int(time.time())},
            **fields,
        )

    def enter(self, status: Status) -> None:
        """Change the status, and note when."""
        self.status = status
        self.at.setdefault(status, int(time.time()))

    def as_dict(self) -> dict[str, Any]:
        """Return OpenAI's batch object."""
        errors = {"object": "list", "data": msgspec.to_builtins(self.errors)}
        times = ("in_progress", "finalizing", *OVER, "cancelling")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output if self.has_output else None,
            "error_file_id": self.error if self.has_error else None,
            "created_at": self.at["created"],
            "expires_at": self.expires_at,
            **{f"{name}_at": self.at.get(name) for name in times},
            "request_counts": msgspec.to_builtins(self.counts),
            "metadata": self.metadata,
        }


_batch = msgspec.json.Decoder(Batch).decode


class BatchStore:
    """Keep the batches of all tenants. Every method raises Unavailable if the store is away.

    A batch is written by the gateway that holds its lease, its cancel mark by any.
    """

    def __init__(self, documents: Documents):
        self.documents = documents

    async def save(self, owner: str, batch: Batch) -> None:
        """Store a batch in place of what is known of it."""
        await self.documents.put(owner, f"batches.{batch.id}", msgspec.json.encode(batch))

    async def get(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises NotFound if this tenant has none of that id."""
        what = f"batch {batch_id[:80]!r}"
        if not _ID.fullmatch(batch_id):
            raise missing(what)
        batch = await read_record(
            self.documents, owner, f"batches.{batch_id}", _batch, what=what, schema=SCHEMA
        )
        if batch.status not in OVER:
            at = await self.cancelled_at(owner, batch_id)
            if at is not None:
                batch.status, batch.at["cancelling"] = "cancelling", at
        return batch

    async def ids(self, owner: str) -> list[str]:
        """Return the ids of a tenant's batches, the oldest first."""
        names = await self.documents.names(owner, "batches")
        return [name.removeprefix("batches.") for name in names]

    async def cancel(self, owner: str, batch_id: str) -> None:
        """Ask the gateway that runs a batch to end it; repeating it changes nothing."""
        await self.documents.create(owner, f"cancelled.{batch_id}", b"%d" % time.time())

    async def cancelled_at(self, owner: str, batch_id: str) -> int | None:
        """Return the Unix time at which a batch was cancelled, None if it was not."""
        try:
            return int(await self.documents.get(owner, f"cancelled.{batch_id}"))
        except NotFound:
            return None
