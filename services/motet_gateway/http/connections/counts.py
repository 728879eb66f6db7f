"""Count connections, in total and by address, and refuse those beyond the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from motet_gateway.http.problems import TooManyConnections

from .addresses import TrustedProxies, counted, parse


class Lease:
    """Represent one counted connection or request; `release` returns it, once."""

    __slots__ = ("_address", "_counts", "_total")

    def __init__(self, counts: ConnectionCounts, address: str | None, *, total: bool):
        self._counts, self._address, self._total = counts, address, total
        counts.total += total
        if address is not None:
            counts.by_address[address] += 1

    def release(self) -> None:
        counts, address = self._counts, self._address
        counts.total -= self._total
        self._address, self._total = None, False
        if address is not None:
            counts.by_address[address] -= 1
            if not counts.by_address[address]:
                del counts.by_address[address]


class ConnectionCounts:
    """Count one server's connections; `refused` is called with the reason of each refusal."""

    def __init__(
        self,
        most: int = 8192,
        most_by_address: int = 2048,
        proxies: tuple[str, ...] = (),
        refused: Callable[[str], None] = lambda reason: None,
    ):
        self.most, self.most_by_address, self.refused = most, most_by_address, refused
        self.proxies = TrustedProxies(proxies)
        self.trusts = bool(proxies)
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def connect(self, peer: str | None, *, is_admitted: bool = False) -> Lease:
        """Count a connection from an IP address; None if the address is unknown.

        A trusted proxy counts towards the total only: its clients are counted one by one, with each
        request. Raises TooManyConnections beyond the limits, unless it `is_admitted` already, by
        another gateway that has served it before.
        """
        address = parse(peer) if peer else None
        name = counted(address) if address is not None and address not in self.proxies else None
        if not is_admitted:
            self._check_total()
            self._check_address(name)
        return Lease(self, name, total=True)

    @contextmanager
    def request(self, peer: str | None, forwarded: list[bytes]) -> Iterator[None]:
        """Count a request that came through a trusted proxy while the block runs.

        Raises TooManyConnections beyond the limit of its client's address.
        """
        address = parse(peer) if peer else None
        if address is None or address not in self.proxies:
            yield
            return
        client = self.proxies.client(address, b",".join(forwarded).decode("latin-1"))
        name = counted(client) if client not in self.proxies else None
        self._check_address(name)
        lease = Lease(self, name, total=False)
        try:
            yield
        finally:
            lease.release()

    def _check_total(self) -> None:
        if self.total >= self.most:
            self._refuse(
                "total",
                f"{self.total} connections are open, the limit of this server (--max-connections)",
            )

    def _check_address(self, name: str | None) -> None:
        if name is not None and self.by_address[name] >= self.most_by_address:
            most = f"the limit for one address (--max-connections-per-address), here {name}"
            self._refuse("address", f"{self.most_by_address} connections are open, {most}")

    def _refuse(self, reason: str, message: str) -> None:
        self.refused(reason)
        raise TooManyConnections(f"{message}; try again in a moment")
