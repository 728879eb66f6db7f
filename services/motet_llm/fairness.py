"""Who has been served how much: tokens computed per tenant, and per user of a tenant.

A virtual token counter (Sheng et al. 2024, "Fairness in Serving Large Language Models"): the tenant with the lowest
count goes first, and one that comes back from idleness starts at the lowest count of those that are active, so that
nobody saves up claims by being away.

A tenant may have users: "acme\\0ann" is Ann of acme. What they get together is acme's share, however many they are; how
they divide it is decided in the same way among themselves.
"""

from __future__ import annotations

from collections import Counter


def house(tenant: str) -> str:
    """Whose share it is: the tenant without its user."""
    return tenant.partition("\0")[0]


class Shares:
    """Tokens served to tenants, and within each to its users."""

    def __init__(self) -> None:
        self._houses = TokenCounts()
        self._users: dict[str, TokenCounts] = {}

    def enter(self, tenant: str) -> None:
        """One more request."""
        self._houses.enter(house(tenant))
        self._users.setdefault(house(tenant), TokenCounts()).enter(tenant)

    def leave(self, tenant: str) -> None:
        """One request less."""
        self._houses.leave(house(tenant))
        users = self._users[house(tenant)]
        users.leave(tenant)
        if not len(users):
            del self._users[house(tenant)]

    def serve(self, tenant: str, num_tokens: int) -> None:
        self._houses.serve(house(tenant), num_tokens)
        self._users[house(tenant)].serve(tenant, num_tokens)

    def served(self, tenant: str) -> tuple[int, int]:
        """To the house, then to its user: the lowest goes first."""
        return self._houses.served(house(tenant)), self._users[house(tenant)].served(tenant)

    def of_house(self, name: str) -> int:
        """Tokens served to all users of a house that has requests here."""
        return self._houses.served(name)

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._houses)


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
