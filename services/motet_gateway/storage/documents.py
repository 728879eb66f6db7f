"""Keep documents of tenants by name: small ones in a key-value bucket, large ones as objects.

Each tenant has buckets of its own. So one cannot reach what belongs to another, what a tenant uses
is known without reading it, and deleting it all is one step.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import nats.js.errors

from motet_gateway.http.problems import NotFound

from .jetstream import ERRORS, TIMEOUT, key_value, object_store, read_object, unavailable
from .quota import READ_EVERY

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.kv import KeyValue
    from nats.js.object_store import ObjectStore

NEVER = 0.0  # the `ttl` of documents that stay until they are deleted
SMALL = 256 << 10  # bytes of a document that is stored as the value of its key
# First byte of a value: the document follows, or the name of its object, or the object has the
# document's own name.
_INLINE, _OBJECT = b"\x00", b"\x01"


class Documents(Protocol):
    """Keep documents of tenants. Every method raises Unavailable if the store does not answer.

    `owner` is the tenant's name, "" where no key is required. Names have letters, digits, `_`, `-`
    and `.`.
    """

    async def put(self, owner: str, name: str, data: bytes) -> None:
        """Store a document, in place of one of the same name."""

    async def create(self, owner: str, name: str, data: bytes) -> bool:
        """Store a document unless there is one of its name; return False if there is another.

        So one of several that write the same name succeeds. A repetition of one that succeeded,
        with the same data, does too.
        """

    async def get(self, owner: str, name: str) -> bytes:
        """Return a document. Raises NotFound if there is none, or it has expired."""

    async def names(self, owner: str, prefix: str) -> list[str]:
        """Return the names that have one more word behind `prefix` and a dot, sorted."""

    async def delete(self, owner: str, name: str) -> None:
        """Delete a document, if there is one."""

    async def delete_all(self, owner: str) -> None:
        """Delete all documents of a tenant."""

    async def used(self, owner: str) -> int:
        """Return the bytes that a tenant's documents take."""


def _object_of(name: str, value: bytes) -> str:
    """Return the object that the value of a key refers to."""
    return value[1:].decode() or name


@dataclass(slots=True)
class _Buckets:
    """Hold the buckets of one tenant, and the bytes in them as they were last read."""

    keys: KeyValue
    objects: ObjectStore
    bytes: int = 0
    read_at: float = float("-inf")


class JetStreamDocuments:
    """Keep documents in JetStream, in files, for `ttl` seconds since they were stored.

    Buckets are named `prefix`, or `prefix`_TENANT, and created when a tenant's first document is
    stored.
    """

    def __init__(self, client: Client, prefix: str, ttl: float):
        self._js = client.jetstream(timeout=TIMEOUT)
        self._prefix, self._ttl = prefix, ttl
        self._buckets: dict[str, _Buckets] = {}
        self._creating = asyncio.Lock()

    async def put(self, owner: str, name: str, data: bytes) -> None:
        try:
            buckets = await self._create(owner)
            if len(data) <= SMALL:
                await buckets.keys.put(name, _INLINE + data)
            else:
                await buckets.objects.put(name, data)
                await buckets.keys.put(name, _OBJECT)
        except ERRORS as error:
            self._buckets.pop(owner, None)
            raise unavailable("it cannot be stored", error) from None
        buckets.bytes += len(data)

    async def create(self, owner: str, name: str, data: bytes) -> bool:
        try:
            buckets = await self._create(owner)
            value = _INLINE + data
            if len(data) > SMALL:
                # Of its own name, since another one that loses must not replace the first.
                value = _OBJECT + f"{name}.{secrets.token_hex(8)}".encode()
                await buckets.objects.put(value[1:].decode(), data)
            try:
                await buckets.keys.create(name, value)
            except nats.js.errors.KeyWrongLastSequenceError:
                if value[:1] == _OBJECT:
                    await buckets.objects.delete(value[1:].decode())
                return await self.get(owner, name) == data
        except ERRORS as error:
            self._buckets.pop(owner, None)
            raise unavailable("it cannot be stored", error) from None
        buckets.bytes += len(data)
        return True

    async def get(self, owner: str, name: str) -> bytes:
        try:
            buckets = await self._open(owner)
            value = (await buckets.keys.get(name)).value or b""
            if value[:1] == _OBJECT:
                return await read_object(buckets.objects, _object_of(name, value))
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidKeyError):
            raise NotFound(f"{name[:80]!r} does not exist; it may have expired") from None
        except ERRORS as error:
            raise unavailable("it cannot be read", error) from None
        return value[1:]

    async def read(self, owner: str, name: str) -> tuple[bytes, int]:
        """Return a small document with its revision. Raises NotFound if there is none."""
        try:
            found = await (await self._open(owner)).keys.get(name)
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidKeyError):
            raise NotFound(f"{name[:80]!r} does not exist; it may have expired") from None
        except ERRORS as error:
            raise unavailable("it cannot be read", error) from None
        return (found.value or b"")[1:], found.revision or 0

    async def replace(self, owner: str, name: str, data: bytes, revision: int) -> int | None:
        """Store a small document in place of this revision, and return the new one.

        revision: 0: there is none yet. Returns None if the document has another revision by now.
        """
        try:
            buckets = await self._create(owner)
            made = await buckets.keys.update(name, _INLINE + data, last=revision)
        except nats.js.errors.KeyWrongLastSequenceError:
            return None
        except ERRORS as error:
            self._buckets.pop(owner, None)
            raise unavailable("it cannot be stored", error) from None
        buckets.bytes += len(data)
        return made

    async def names(self, owner: str, prefix: str) -> list[str]:
        before = f"$KV.{self._bucket(owner)}."
        try:
            info = await self._js.stream_info(
                f"KV_{self._bucket(owner)}", subjects_filter=f"{before}{prefix}.*"
            )
        except nats.js.errors.NotFoundError:
            return []
        except ERRORS as error:
            raise unavailable("what this key has stored cannot be listed", error) from None
        return sorted(subject.removeprefix(before) for subject in info.state.subjects or ())

    async def delete(self, owner: str, name: str) -> None:
        try:
            buckets = await self._open(owner)
            value = (await buckets.keys.get(name)).value or b""
            # Unlike a bucket's own deletion, this leaves no mark behind.
            await self._js.purge_stream(
                f"KV_{self._bucket(owner)}", subject=f"$KV.{self._bucket(owner)}.{name}"
            )
            if value[:1] == _OBJECT:
                await buckets.objects.delete(_object_of(name, value))
        except (nats.js.errors.NotFoundError, nats.js.errors.InvalidKeyError):
            return
        except ERRORS as error:
            raise unavailable("it cannot be deleted", error) from None
        buckets.read_at = float("-inf")

    async def delete_all(self, owner: str) -> None:
        self._buckets.pop(owner, None)
        try:
            for stream in self._streams(owner):
                with suppress(nats.js.errors.NotFoundError):
                    await self._js.purge_stream(stream)
        except ERRORS as error:
            raise unavailable("they cannot be deleted", error) from None

    async def used(self, owner: str) -> int:
        try:
            buckets = await self._open(owner)
            if time.monotonic() - buckets.read_at >= READ_EVERY:
                infos = [await self._js.stream_info(name) for name in self._streams(owner)]
                buckets.bytes = sum(info.state.bytes for info in infos)
                buckets.read_at = time.monotonic()
        except nats.js.errors.NotFoundError:
            return 0
        except ERRORS as error:
            raise unavailable("what this key has stored cannot be listed", error) from None
        return buckets.bytes

    # ------------------------------------------------------------------------------------- buckets
    def _bucket(self, owner: str) -> str:
        return f"{self._prefix}_{owner}" if owner else self._prefix

    def _streams(self, owner: str) -> tuple[str, str]:
        """Return the streams behind a tenant's buckets."""
        bucket = self._bucket(owner)
        return f"KV_{bucket}", f"OBJ_{bucket}"

    async def _open(self, owner: str) -> _Buckets:
        """Return a tenant's buckets. Raises NotFoundError if nothing was ever stored."""
        if owner not in self._buckets:
            bucket = self._bucket(owner)
            found = await self._js.key_value(bucket), await self._js.object_store(bucket)
            self._buckets[owner] = _Buckets(*found)
        return self._buckets[owner]

    async def _create(self, owner: str) -> _Buckets:
        """Return a tenant's buckets, which are created if there are none yet."""
        if owner not in self._buckets:
            async with self._creating:
                bucket = self._bucket(owner)
                keys = await key_value(self._js, bucket, self._ttl)
                objects = await object_store(self._js, bucket, self._ttl)
                self._buckets.setdefault(owner, _Buckets(keys, objects))
        return self._buckets[owner]
