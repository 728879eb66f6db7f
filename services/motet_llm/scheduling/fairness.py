"""Count the tokens computed per tenant, and per user of a tenant, to share the engine fairly.

A virtual token counter (Sheng et al. 2024, "Fairness in Serving Large Language Models"): the tenant
with the lowest count goes first. A tenant that returns from idleness starts at the lowest count of
the active tenants, so idle time earns no credit.

A tenant may have users: "acme\\0ann" is user ann of tenant acme. All users of a tenant (a tenant
group) share one share of the engine, however many they are; the same rule divides it among them.
"""

from __future__ import annotations

from collections import Counter


def tenant_group(tenant: str) -> str:
    """Return the tenant without its user: the group whose share is used."""
    return tenant.partition("\0")[0]


class FairShares:
    """Count the tokens served to each tenant group, and within each group to its users."""

    def __init__(self) -> None:
        self._groups = TokenCounts()
        self._users: dict[str, TokenCounts] = {}

    def enter(self, tenant: str) -> None:
        """Register one more request of a tenant."""
        self._groups.enter(tenant_group(tenant))
        self._users.setdefault(tenant_group(tenant), TokenCounts()).enter(tenant)

    def leave(self, tenant: str) -> None:
        """Remove one request of a tenant."""
        self._groups.leave(tenant_group(tenant))
        users = self._users[tenant_group(tenant)]
        users.leave(tenant)
        if not len(users):
            del self._users[tenant_group(tenant)]

    def serve(self, tenant: str, num_tokens: int) -> None:
        """Count tokens computed for a tenant with requests here; negative to take them back."""
        self._groups.serve(tenant_group(tenant), num_tokens)
        self._users[tenant_group(tenant)].serve(tenant, num_tokens)

    def served(self, tenant: str) -> tuple[int, int]:
        """Return the tokens served to the group and to its user: a sort key, lowest first."""
        return self._groups.served(tenant_group(tenant)), self._users[tenant_group(tenant)].served(
            tenant
        )

    def served_to_group(self, name: str) -> int:
        """Return the tokens served to all users of a tenant group that has requests here."""
        return self._groups.served(name)

    def __len__(self) -> int:
        """Return the number of tenant groups that are remembered."""
        return len(self._groups)


class TokenCounts:
    """Count the tokens served to tenants.

    Kept are the tenants that have requests in the engine, and idle ones whose count is still above
    the lowest active one.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Register one more request of a tenant."""
        if not self._requests[tenant]:
            self._served[tenant] = max(self._served.get(tenant, 0), self._lowest())
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Remove one request. Idle tenants whose count is not above the others' are forgotten."""
        self._requests[tenant] -= 1
        if self._requests[tenant]:
            return
        del self._requests[tenant]
        lowest = self._lowest()
        for idle in self._served.keys() - self._requests.keys():
            if not self._requests or self._served[idle] <= lowest:
                del self._served[idle]

    def _lowest(self) -> int:
        return min((self._served[tenant] for tenant in self._requests), default=0)

    def serve(self, tenant: str, num_tokens: int) -> None:
        """Count tokens computed for a tenant with requests here; negative to take them back."""
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> int:
        return self._served[tenant]

    def __len__(self) -> int:
        """Return the number of tenants that are remembered."""
        return len(self._served)
