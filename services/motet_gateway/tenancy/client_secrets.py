"""Issue client secrets: keys for browsers that open one realtime session, for a short time.

A secret stands for the key that it was made with: it counts for the same tenant, and ends with that
key. Where NATS has JetStream, every gateway of the stack knows it; its session is that of the
gateway where it is opened, or of the one that adopts its connection. Only digests are kept.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import NotFound, RateLimited, Unauthorized
from motet_gateway.storage.documents import Documents
from motet_gateway.storage.records import read_record
from motet_shared.tenants import digest

from .buckets import Clock
from .tenant import Tenant

PREFIX = "ek_"
SECRET = "client secret"  # name under which a kept session notes the one that opened it
SHORTEST, USUAL, LONGEST = 10, 600, 7200  # seconds until a secret expires
MAX_SECRETS = 1000  # of a tenant, at a time, that a gateway knows
SCHEMA = 1  # version of what is stored; increase it with a change that older versions cannot read
_FORM = re.compile(PREFIX + "[A-Za-z0-9_-]{43}")
_ADOPTION = 60  # seconds in which the session of an adopted connection begins
_NANOSECONDS = 1_000_000_000


class StoredSecret(Struct, kw_only=True, omit_defaults=True):
    """A secret as it is stored, under the digest of its value.

    tenant: name under which its things are kept. key, session, session_id: as in `ClientSecret`.
    expires_at: Unix seconds.
    """

    version: int = SCHEMA
    tenant: str
    key: str
    expires_at: float
    session: str
    session_id: str


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StoredSecret).decode


@dataclass(slots=True, eq=False)
class ClientSecret:
    """A secret that has been issued.

    digest: of its value. key: digest of the key that made it. session: settings of its session,
    which it may open once, as JSON. session_id: the id of that session. opened: that has happened.
    """

    digest: str
    tenant: Tenant
    key: str
    expires: int  # ns of the clock
    session: str
    session_id: str
    opened: bool = False

    def check_unused(self) -> None:
        """Raise Unauthorized if it has opened its session."""
        if self.opened:
            raise Unauthorized("the client secret has opened its session; ask for another one")


class ClientSecrets:
    """Know the secrets of the stack.

    exists: returns True while a session exists here, to which its client may come back. tenant:
    returns the tenant of a name. Without `documents`, only this gateway knows what it issues.
    """

    def __init__(
        self,
        clock: Clock,
        exists: Callable[[str], bool],
        tenant: Callable[[str], Tenant | None],
    ):
        self.documents: Documents | None = None
        self._clock, self._exists, self._tenant = clock, exists, tenant
        self._secrets: dict[str, ClientSecret] = {}

    def __len__(self) -> int:
        return len(self._secrets)

    async def issue(
        self, tenant: Tenant, key: str, session: str, session_id: str, seconds: int
    ) -> str:
        """Return a new secret.

        Raises RateLimited if the tenant has too many, Unavailable if it cannot be stored.
        """
        self._forget_expired()
        mine = [one for one in self._secrets.values() if one.tenant is tenant]
        if len(mine) >= MAX_SECRETS:
            wait = min(one.expires for one in mine) - self._clock()
            message = f"{len(mine)} client secrets are in use, the most allowed; try again later"
            raise RateLimited(message, "requests", max(1, wait // _NANOSECONDS))
        value = PREFIX + secrets.token_urlsafe(32)
        expires = self._clock() + seconds * _NANOSECONDS
        made = ClientSecret(digest(value), tenant, key, expires, session, session_id)
        if self.documents is not None:
            await self.documents.put("", f"secrets.{made.digest}", self.stored(made))
        self._secrets[made.digest] = made
        return value

    async def find(self, value: str) -> ClientSecret:
        """Return a secret that is valid. Raises Unauthorized, Unavailable while the store is away."""
        name = digest(value)
        if name not in self._secrets and _FORM.fullmatch(value) is not None:
            await self._learn(name)
        secret = self._secrets.get(name)
        if secret is None or not self._is_valid(secret):
            raise Unauthorized("the client secret is unknown or has expired; ask for another one")
        return secret

    async def open(self, secret: ClientSecret) -> None:
        """Use up a secret for its session. Raises Unauthorized if that was opened, at any gateway."""
        secret.check_unused()
        secret.opened = True
        if self.documents is None:
            return
        mark = secrets.token_bytes(16)
        try:
            is_first = await self.documents.create("", f"opened.{secret.digest}", mark)
        except BaseException:
            secret.opened = False
            raise
        if not is_first:
            secret.check_unused()
        self._secrets[secret.digest] = secret  # its session does not exist yet

    async def close(self, secret: ClientSecret) -> None:
        """Have a secret unused again: its session could not be opened."""
        secret.opened = False
        if self.documents is not None:
            await self.documents.delete("", f"opened.{secret.digest}")

    def stored(self, secret: ClientSecret) -> bytes:
        """Return what another gateway needs of a secret."""
        left = (secret.expires - self._clock()) / _NANOSECONDS
        return _encode(
            StoredSecret(
                tenant=secret.tenant.owner,
                key=secret.key,
                expires_at=time.time() + left,
                session=secret.session,
                session_id=secret.session_id,
            )
        )

    def adopt(self, value: str, stored: bytes) -> None:
        """Know a secret whose session is adopted from another gateway, whatever its age."""
        until = time.time() + _ADOPTION
        self._add(digest(value), msgspec.structs.replace(_decode(stored), expires_at=until))

    async def _learn(self, name: str) -> None:
        """Know a secret that another gateway has issued, if there is one."""
        if self.documents is None:
            return
        try:
            found = await read_record(
                self.documents, "", f"secrets.{name}", _decode, what="client secret", schema=SCHEMA
            )
        except NotFound:
            return
        self._forget_expired()
        self._add(name, found)

    def _add(self, name: str, found: StoredSecret) -> None:
        if (tenant := self._tenant(found.tenant)) is not None:
            expires = self._clock() + int((found.expires_at - time.time()) * _NANOSECONDS)
            self._secrets[name] = ClientSecret(
                name, tenant, found.key, expires, found.session, found.session_id
            )

    def _is_valid(self, secret: ClientSecret) -> bool:
        """Return True until it expires, or once it has opened its session, until that is over."""
        if secret.opened:
            return self._exists(secret.session_id)
        return self._clock() < secret.expires

    def _forget_expired(self) -> None:
        self._secrets = {
            key: secret for key, secret in self._secrets.items() if self._is_valid(secret)
        }
