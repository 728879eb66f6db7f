"""Define what a tenant's requests may ask for, and under which name the engine counts them."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet_shared.errors import BadRequest
from motet_shared.messages import BACKGROUND, TIERS
from motet_shared.tenants import TenantLimits

BATCHES = "batches"  # first part of the engine's tenant of a batch; no tenant's name has a slash


@dataclass(frozen=True, slots=True)
class Rights:
    """Rights of a tenant. `name`: the tenant's, "" where no key is required.

    background: of its batches, which have a share of their own and the lowest priority.
    """

    name: str = ""
    limits: TenantLimits = field(default_factory=TenantLimits)
    background: bool = False

    def share(self, user: str) -> str:
        """Return the engine's tenant for `user`: all users of a tenant divide its one share."""
        if self.background:
            return f"{BATCHES}/{self.name}"
        return f"{self.name}\0{user}" if self.name and user else self.name or user

    def priority(self, tier: str | None) -> int:
        """Return the priority of a service tier; without one, or with `auto`: at most the default.

        Raises BadRequest for a tier above the tenant's.
        """
        if self.background:
            return BACKGROUND
        highest = TIERS[self.limits.service_tier]
        if tier in (None, "auto"):
            return min(highest, 0)
        priority = TIERS[str(tier)]
        if priority > highest:
            message = f"`service_tier` {tier!r} is above {self.limits.service_tier!r}, the highest allowed for this key"
            raise BadRequest(f"{message}; leave it out", param="service_tier")
        return priority

    @property
    def sites(self) -> tuple[str, ...]:
        """Return the sites at which the tenant's work may be done; empty: everywhere."""
        return self.limits.sites or ()

    @property
    def max_context(self) -> int:
        """Return the most tokens of a prompt with its reply; 0: the model's limit."""
        return self.limits.max_context or 0


UNRESTRICTED = Rights()
