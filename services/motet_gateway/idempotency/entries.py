"""Keep what gateways know of requests with an `Idempotency-Key`: an entry each, and the reply at its end.

An entry has what makes a reply the same at another gateway: the secret from which ids and seeds are
drawn, and the time. Each change of an entry is made against its last revision, so of several
gateways one has the request.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import NotFound
from motet_gateway.storage.documents import JetStreamDocuments
from motet_gateway.storage.quota import Stored

_SECRET_BYTES = 16
ENTRY_BYTES = 512  # of an entry in the store, at most
MAX_REPLY = 4 << 20  # bytes of a reply that is stored


class Entry(Struct, kw_only=True, omit_defaults=True):
    """What is known of one request.

    digest: of path and body. attempt: drawn by the attempt that has the request. content_type: of the
    reply, once it is stored.
    """

    digest: str
    secret: bytes
    created: int
    attempt: str
    content_type: str = ""

    @property
    def is_done(self) -> bool:
        return bool(self.content_type)


@dataclass(frozen=True, slots=True)
class Claim:
    """Hold an entry that this attempt has, with its revision and its name in the tenant's store.

    is_new: this attempt is the first.
    """

    tenant: str
    name: str
    entry: Entry
    revision: int
    is_new: bool = False


class Mismatch(Exception):
    """Signal that the key belongs to another request."""


class Entries:
    """Keep the entries of all tenants. Every method raises Unavailable if the store is away."""

    def __init__(self, documents: JetStreamDocuments, stored: Stored):
        self._documents, self._stored = documents, stored
        stored.meters.append(documents.used)

    async def claim(self, tenant: str, key: str, digest: str, *, is_known: bool) -> Claim:
        """Take a request for a new attempt, or return its entry if it is done.

        is_known: the client has had a part of the reply. Raises Mismatch if the key was used for
        another request, NotFound if it must be known and is not, QuotaExceeded if the tenant has no
        room for one more.
        """
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        attempt = secrets.token_hex(8)
        while True:
            try:
                data, revision = await self._documents.read(tenant, name)
            except NotFound:
                if is_known:
                    raise NotFound(
                        "Last-Event-ID: no reply is known under this Idempotency-Key; it may have"
                        " expired: send the request without Last-Event-ID",
                        param="Last-Event-ID",
                    ) from None
                await self._stored.check(tenant, ENTRY_BYTES, "Idempotency-Key")
                revision = 0
                entry = Entry(
                    digest=digest,
                    secret=secrets.token_bytes(_SECRET_BYTES),
                    created=int(time.time()),
                    attempt=attempt,
                )
            else:
                entry = _decode(data)
                if entry.digest != digest:
                    raise Mismatch
                if entry.is_done:
                    return Claim(tenant, name, entry, revision)
                entry.attempt = attempt
            taken = await self._documents.replace(tenant, name, _encode(entry), revision)
            if taken is not None:
                return Claim(tenant, name, entry, taken, is_new=not revision)

    async def is_mine(self, claim: Claim) -> bool:
        """Return True if no other attempt has taken the request."""
        try:
            data, _ = await self._documents.read(claim.tenant, claim.name)
        except NotFound:
            return False
        return _decode(data).attempt == claim.entry.attempt

    async def is_answered(self, claim: Claim) -> bool:
        """Return True if another attempt has stored its reply."""
        try:
            data, _ = await self._documents.read(claim.tenant, claim.name)
        except NotFound:
            return False
        found = _decode(data)
        return found.is_done and found.attempt != claim.entry.attempt

    async def finish(self, claim: Claim, content_type: str, reply: bytes) -> bool:
        """Store the reply for later attempts, if there is room; return False if another has it."""
        await self._stored.check(claim.tenant, len(reply), "Idempotency-Key")
        await self._documents.put(claim.tenant, f"{claim.name}.reply", reply)
        claim.entry.content_type = content_type
        data = _encode(claim.entry)
        return (
            await self._documents.replace(claim.tenant, claim.name, data, claim.revision)
        ) is not None

    async def reply(self, claim: Claim) -> bytes:
        """Return a stored reply. Raises NotFound if it has expired."""
        return await self._documents.get(claim.tenant, f"{claim.name}.reply")

    async def forget(self, claim: Claim) -> None:
        """Delete the entry of a request that was refused: a corrected one may have its key."""
        if await self.is_mine(claim):
            await self._documents.delete(claim.tenant, claim.name)


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Entry).decode
