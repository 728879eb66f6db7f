"""Who has been served how much: tokens computed per tenant.

A virtual token counter (Sheng et al. 2024, "Fairness in Serving Large Language Models"): the tenant with the lowest
count goes first, and one that comes back from idleness starts at the lowest count of those that are active, so that
nobody saves up claims by being away.
"""

from __future__ import annotations

from collections import Counter


class TokenCounts:
    """Tokens served to the tenants that have requests in the engine, and to those that may still have had too much."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """One more request of a tenant."""
        if not self._requests[tenant]:
            self._served[tenant] = max(self._served.get(tenant, 0), self._lowest())
        self._requests[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One request less. Idle tenants that have no more than others are forgotten."""
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
        self._served[tenant] += num_tokens

    def served(self, tenant: str) -> int:
        return self._served[tenant]

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._served)
