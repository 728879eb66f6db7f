"""What the requests of a tenant may ask for, and under which name the engine counts them."""

from __future__ import annotations

from dataclasses import dataclass, field

from motet_shared.errors import BadRequest
from motet_shared.messages import TIERS
from motet_shared.tenants import TenantLimits


@dataclass(frozen=True, slots=True)
class Rights:
    """`name`: of the tenant, "" where nobody needs a key."""

    name: str = ""
    limits: TenantLimits = field(default_factory=TenantLimits)

    def share(self, user: str) -> str:
        """The tenant as the engine knows it: one share for all of its users, who divide it among themselves."""
        return f"{self.name}\0{user}" if self.name and user else self.name or user

    def priority(self, tier: str | None) -> int:
        """Of a request of this service tier; without one, or `auto`: as high as may be, but not before others.

        BadRequest for a tier that is too high.
        """
        highest = TIERS[self.limits.service_tier]
        if tier in (None, "auto"):
            return min(highest, 0)
        priority = TIERS[str(tier)]
        if priority > highest:
            message = f"`service_tier` {tier!r} is above {self.limits.service_tier!r}, the highest allowed for this key"
            raise BadRequest(f"{message}; leave it out", param="service_tier")
        return priority

    @property
    def max_context(self) -> int:
        """Most tokens of a prompt with its reply; 0: as many as the model takes."""
        return self.limits.max_context or 0


ANYONE = Rights()
