"""Who asks: the tenant of a key, or everybody where nobody needs one. Keys are known by their digests alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from motet_shared.tenants import DEFAULT, TenantLimits, Tenants, digest, load_tenants

from .asgi import Scope, header
from .buckets import Clock
from .config import GatewayConfig
from .limits import Limits
from .metrics import GatewayMetrics
from .origins import Origins
from .problems import Forbidden, Unauthorized
from .tenants import Tenant

_SUBPROTOCOL = "openai-insecure-api-key."  # browsers cannot set headers on a WebSocket


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `key`: the digest of the key that was shown, "" where none is needed."""

    tenant: Tenant
    key: str = ""


class Door:
    """Lets in who has a key. Where there are neither keys nor tenants, everyone who can reach the port may ask."""

    def __init__(self, config: GatewayConfig, gate: Limits, metrics: GatewayMetrics, clock: Clock = time.monotonic_ns):
        self.origins = Origins(config.allowed_origins)
        self._make: Callable[[str, TenantLimits], Tenant] = lambda name, limits: Tenant(
            name, limits, gate, metrics, clock
        )
        self._keyed = config.needs_key
        plain = self._make(DEFAULT if self._keyed else "", TenantLimits(metrics=True))
        self._plain = Caller(plain)
        self._plain_keys = {digest(key): plain for key in config.api_keys}
        self._tenants: dict[str, Tenant] = {}
        self._keys = self._plain_keys
        if config.tenants_file is not None:
            self.use(load_tenants(config.tenants_file))

    def use(self, tenants: Tenants) -> None:
        """These tenants and keys from now on. What a tenant has used stays used."""
        for name, limits in tenants.limits.items():
            if name in self._tenants:
                self._tenants[name].limit(limits)
            else:
                self._tenants[name] = self._make(name, limits)
        for name in self._tenants.keys() - tenants.limits.keys():
            del self._tenants[name]
        self._keys = self._plain_keys | {key.sha256: self._tenants[key.tenant] for key in tenants.keys}

    def enter(self, scope: Scope) -> Caller:
        """Who asks. Unauthorized without an accepted key, Forbidden for a page of a site that may not ask."""
        self.origins.check(scope, keyed=self._keyed)
        if not self._keyed:
            return self._plain
        given = _bearer(scope) or _from_subprotocol(scope)
        if not given:
            raise Unauthorized("no API key was sent; send `Authorization: Bearer <key>`")
        # What is looked up is a digest, which nobody can choose: the time of the search tells nothing about a key.
        key = digest(given)
        if (tenant := self._keys.get(key)) is None:
            raise Unauthorized("the API key is not accepted here")
        return Caller(tenant, key)

    def still_takes(self, caller: Caller) -> bool:
        """Whether who came in with a key would come in again."""
        return not self._keyed or self._keys.get(caller.key) is caller.tenant

    def check_metrics(self, tenant: Tenant) -> None:
        """Forbidden for a tenant that may not see what others do."""
        if not tenant.limits.metrics:
            raise Forbidden("this key does not open /metrics; set `metrics = true` for its tenant")

    def check_integrity(self) -> None:
        for tenant in (self._plain.tenant, *self._tenants.values()):
            if tenant.streams < 0 or tenant.sockets < 0:
                raise RuntimeError(f"{tenant.streams} streams, {tenant.sockets} sockets: something was released twice")


def _bearer(scope: Scope) -> str:
    scheme, _, key = header(scope, b"authorization").decode("latin-1").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _from_subprotocol(scope: Scope) -> str:
    offered = (name for name in scope.get("subprotocols", ()) if name.startswith(_SUBPROTOCOL))
    return next(offered, "")[len(_SUBPROTOCOL) :]
