"""Issue client secrets: keys for browsers that open one realtime session, for a short time.

A secret is known to the gateway that issued it, as its session is. It stands for the key that it
was made with: it counts for the same tenant, and ends with that key. Only digests are kept.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from motet_gateway.http.problems import RateLimited, Unauthorized
from motet_shared.tenants import digest

from .buckets import Clock
from .tenant import Tenant

PREFIX = "ek_"
SHORTEST, USUAL, LONGEST = 10, 600, 7200  # seconds until a secret expires
MAX_SECRETS = 1000  # of a tenant, at a time
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True, eq=False)
class ClientSecret:
    """A secret that has been issued.

    key: digest of the key that made it. settings: of its session, which it may open once.
    session_id: the id of that session. opened: that has happened.
    """

    tenant: Tenant
    key: str
    expires: int  # ns of the clock
    settings: Any
    session_id: str
    opened: bool = False

    def check_unused(self) -> None:
        """Raise Unauthorized if it has opened its session."""
        if self.opened:
            raise Unauthorized("the client secret has opened its session; ask for another one")


class ClientSecrets:
    """Keep the secrets of one gateway.

    exists: returns True while a session exists, to which its client may come back.
    """

    def __init__(self, clock: Clock, exists: Callable[[str], bool]):
        self._clock, self._exists = clock, exists
        self._secrets: dict[str, ClientSecret] = {}

    def __len__(self) -> int:
        return len(self._secrets)

    def issue(self, tenant: Tenant, key: str, settings: Any, session_id: str, seconds: int) -> str:
        """Return a new secret. Raises RateLimited if the tenant has too many."""
        self._forget_expired()
        mine = [one for one in self._secrets.values() if one.tenant is tenant]
        if len(mine) >= MAX_SECRETS:
            wait = min(one.expires for one in mine) - self._clock()
            message = f"{len(mine)} client secrets are in use, the most allowed; try again later"
            raise RateLimited(message, "requests", max(1, wait // _NANOSECONDS))
        value = PREFIX + secrets.token_urlsafe(32)
        expires = self._clock() + seconds * _NANOSECONDS
        self._secrets[digest(value)] = ClientSecret(tenant, key, expires, settings, session_id)
        return value

    def find(self, value: str) -> ClientSecret:
        """Return a secret that is valid. Raises Unauthorized."""
        secret = self._secrets.get(digest(value))
        if secret is None or not self._is_valid(secret):
            raise Unauthorized("the client secret is unknown or has expired; ask for another one")
        return secret

    def _is_valid(self, secret: ClientSecret) -> bool:
        """Return True until it expires, or once it has opened its session, until that is over."""
        if secret.opened:
            return self._exists(secret.session_id)
        return self._clock() < secret.expires

    def _forget_expired(self) -> None:
        self._secrets = {
            key: secret for key, secret in self._secrets.items() if self._is_valid(secret)
        }
