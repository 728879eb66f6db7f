"""Open JetStream: buckets that are created on first use, and the errors that it raises."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

import nats.errors
import nats.js.errors
from nats.js.api import KeyValueConfig, ObjectStoreConfig, StorageType

from motet_shared.errors import Unavailable
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import NatsTransport

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js import JetStreamContext
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

TIMEOUT = 12.0  # seconds for an answer of JetStream, long enough for a pause of NATS
_REPLICAS = 3
# Error codes of JetStream: replicas on a single server, and no servers for all replicas.
_TOO_FEW_SERVERS = (10074, 10005)
ERRORS = (nats.errors.Error, nats.js.errors.Error, TimeoutError)


async def connect(bus: Bus) -> Client | None:
    """Return the client of a bus whose NATS server has JetStream, else None."""
    if not isinstance(bus.frames, NatsTransport):
        return None
    client = bus.frames.client
    try:
        await client.jetstream(timeout=TIMEOUT).account_info()
    except ERRORS:
        return None
    return client


async def create(stream: Callable[[int], Awaitable[object]]) -> None:
    """Create a stream with so many replicas: three, or one where there are fewer servers.

    One that exists keeps its settings.
    """
    with suppress(nats.js.errors.BadRequestError):  # it exists with other settings
        try:
            await stream(_REPLICAS)
        except nats.js.errors.APIError as error:
            if error.err_code not in _TOO_FEW_SERVERS:
                raise
            await stream(1)


async def key_value(js: JetStreamContext, bucket: str, ttl: float) -> KeyValue:
    """Create or reuse a bucket of keys, in files; an existing one keeps its settings.

    `ttl` is in seconds.
    """
    config = KeyValueConfig(bucket=bucket, ttl=ttl, storage=StorageType.FILE)
    await create(lambda replicas: js.create_key_value(replace(config, replicas=replicas)))
    return await js.key_value(bucket)


async def object_store(js: JetStreamContext, bucket: str, ttl: float) -> ObjectStore:
    """Create or reuse a bucket of objects, like `key_value`."""
    config = ObjectStoreConfig(bucket=bucket, ttl=ttl, storage=StorageType.FILE)
    await create(
        lambda replicas: js.create_object_store(bucket, replace(config, replicas=replicas))
    )
    return await js.object_store(bucket)


async def read_object(objects: ObjectStore, name: str) -> bytes:
    """Return an object. Raises one of ERRORS, also if its chunks vanish while they are read.

    nats-py's own `get` then waits for ever, and so does its consumer if the reader is cancelled.
    """
    info = await objects.get_info(name)
    if not info.size:
        return b""
    chunks = await objects._js.subscribe(f"$O.{info.bucket}.C.{info.nuid}", ordered_consumer=True)
    parts, size = [], 0
    try:
        while size < info.size:
            parts.append((await chunks.next_msg(timeout=TIMEOUT)).data)
            size += len(parts[-1])
    finally:
        with suppress(*ERRORS):
            await chunks.unsubscribe()
    data = b"".join(parts)
    if info.digest is not None and info.digest.partition("=")[2] != _digest(data):
        raise nats.js.errors.DigestMismatchError
    return data


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()


def expiry(mtime: str | None, ttl: float) -> float:
    """Return the Unix time in seconds at which an entry put at `mtime` (ISO 8601) expires."""
    try:
        return datetime.fromisoformat(mtime or "").timestamp() + ttl
    except ValueError:
        return time.time() + ttl


def unavailable(what: str, error: BaseException) -> Unavailable:
    """Return the error that says `what` JetStream failed to do, such as "the job cannot be read"."""
    return Unavailable(f"{what}: {error or type(error).__name__}; try again")
