"""Authenticate callers: the tenant of a key, or the default tenant where no key is required.

Keys are stored as digests alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from motet_gateway.config import GatewayConfig
from motet_gateway.http.asgi import Scope, header
from motet_gateway.http.origins import Origins
from motet_gateway.http.problems import Forbidden, Unauthorized
from motet_gateway.http.route import Access
from motet_shared.tenants import DEFAULT, TenantLimits, Tenants, digest, load_tenants

from .buckets import Clock
from .client_secrets import PREFIX, ClientSecret, ClientSecrets
from .concurrency import ConcurrencyLimits
from .counters import TenantCounters
from .shared_bucket import Accounts
from .tenant import Tenant

_SUBPROTOCOL = "openai-insecure-api-key."  # browsers cannot set headers on a WebSocket


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller.

    `key`: digest of the key that was sent, "" where none is required. `secret`: the client secret
    that was sent in its place.
    """

    tenant: Tenant
    key: str = ""
    secret: ClientSecret | None = None


class Authenticator:
    """Authenticate callers by key.

    Without keys and tenants in the configuration, every client that reaches the port is accepted.
    """

    def __init__(
        self,
        config: GatewayConfig,
        concurrency: ConcurrencyLimits,
        counters: TenantCounters,
        clock: Clock = time.monotonic_ns,
    ):
        self.origins = Origins(config.allowed_origins)
        self._make: Callable[[str, TenantLimits], Tenant] = lambda name, limits: Tenant(
            name, limits, concurrency, counters, clock
        )
        self._accounts: Accounts | None = None
        self._keyed = config.needs_key
        default = self._make(DEFAULT if self._keyed else "", TenantLimits(metrics=True))
        self._default = Caller(default)
        self._default_keys = {digest(key): default for key in config.api_keys}
        self._tenants: dict[str, Tenant] = {}
        self._gone: dict[str, Tenant] = {}  # that the tenants file had before
        self._keys = self._default_keys
        if config.tenants_file is not None:
            self.use(load_tenants(config.tenants_file))

    def use(self, tenants: Tenants) -> None:
        """Replace tenants and keys.

        What a tenant has used so far and has open still counts, also once it is gone and returns.
        """
        for name, limits in tenants.limits.items():
            if name in self._gone:
                self._tenants[name] = self._gone.pop(name)
            if name in self._tenants:
                self._tenants[name].limit(limits)
            else:
                self._tenants[name] = self._make(name, limits)
                if self._accounts is not None:
                    self._tenants[name].share(self._accounts)
        for name in self._tenants.keys() - tenants.limits.keys():
            self._gone[name] = self._tenants.pop(name)
        self._keys = self._default_keys | {
            key.sha256: self._tenants[key.tenant] for key in tenants.keys
        }

    def share(self, accounts: Accounts) -> None:
        """Share limits and use of all tenants, those to come included, with other gateways."""
        self._accounts = accounts
        for tenant in (self._default.tenant, *self._tenants.values(), *self._gone.values()):
            tenant.share(accounts)

    def limits_of(self, name: str) -> TenantLimits:
        """Return the limits of a tenant by name, "" where no key is required.

        A tenant that no longer exists has the default limits.
        """
        if name in ("", DEFAULT):
            return self._default.tenant.limits
        return self._tenants[name].limits if name in self._tenants else TenantLimits()

    def tenant(self, name: str) -> Tenant | None:
        """Return a tenant by the name under which its things are kept; None if it is gone."""
        return self._default.tenant if name in ("", DEFAULT) else self._tenants.get(name)

    async def authenticate_any(self, scope: Scope, secrets: ClientSecrets) -> Caller:
        """Return the caller of a request that client secrets open, too.

        Raises as `authenticate`, and Unavailable while a secret cannot be looked up.
        """
        if (value := client_secret(scope)) is None:
            return self.authenticate(scope)
        # A secret allows any page, as a key does, which no page has by itself.
        self.origins.check(scope, keyed=True)
        return self._with_secret(await secrets.find(value))

    def authenticate(self, scope: Scope) -> Caller:
        """Return the caller of a request.

        Raises Unauthorized without an accepted key, Forbidden for a page of a site that is not
        allowed.
        """
        given = _given_key(scope)
        self.origins.check(scope, keyed=self._keyed)
        if not self._keyed:
            return self._default
        if not given:
            raise Unauthorized("no API key was sent; send `Authorization: Bearer <key>`")
        # Looked up by digest, which a client cannot choose: timing reveals nothing about keys.
        key = digest(given)
        if (tenant := self._keys.get(key)) is None:
            raise Unauthorized("the API key is not valid on this server; check the key")
        return Caller(tenant, key)

    def _with_secret(self, secret: ClientSecret) -> Caller:
        """Return the caller of a secret. Raises Unauthorized if its key is no longer accepted."""
        caller = Caller(secret.tenant, secret.key, secret)
        if not self.accepts(caller):
            raise Unauthorized("the key of this client secret is no longer accepted")
        return caller

    def accepts(self, caller: Caller) -> bool:
        """Return True if the key of an accepted caller would be accepted now."""
        return not self._keyed or self._keys.get(caller.key) is caller.tenant

    def authorize(self, tenant: Tenant, access: Access) -> None:
        """Raise Forbidden or RateLimited if the tenant may not call a route of this access now."""
        if access is Access.TENANT:
            tenant.count_request()
        elif access is Access.OPERATOR and not tenant.limits.metrics:
            raise Forbidden(
                "this key has no access to /metrics; set `metrics = true` for its tenant"
            )

    def check_integrity(self) -> None:
        for tenant in (self._default.tenant, *self._tenants.values(), *self._gone.values()):
            streams, sockets = tenant.streams.open, tenant.sockets.open
            if streams < 0 or sockets < 0:
                raise RuntimeError(
                    f"{streams} streams, {sockets} sockets: a slot was released twice"
                )


def client_secret(scope: Scope) -> str | None:
    """Return the client secret of a request, None without one."""
    given = _given_key(scope)
    return given if given.startswith(PREFIX) else None


def _given_key(scope: Scope) -> str:
    return _bearer(scope) or _header_key(scope) or _from_subprotocol(scope)


def _bearer(scope: Scope) -> str:
    scheme, _, key = header(scope, b"authorization").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _header_key(scope: Scope) -> str:
    """Return the key as Anthropic's clients send it."""
    return header(scope, b"x-api-key").decode("latin-1").strip()


def _from_subprotocol(scope: Scope) -> str:
    offered = (name for name in scope.get("subprotocols", ()) if name.startswith(_SUBPROTOCOL))
    return next(offered, "")[len(_SUBPROTOCOL) :]
