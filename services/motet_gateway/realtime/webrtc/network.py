"""Describe where calls listen: addresses and UDP ports, and how clients reach them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import randrange

from aioice.ice import get_host_addresses

from motet_gateway.config import GatewayConfig


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses and ports of this gateway's calls.

    addresses: to bind. announced: what answers name instead, for the same IP version.
    ports: the lowest and the highest; (0, 0) for any that the system gives.
    """

    addresses: tuple[str, ...]
    announced: tuple[str, ...]
    ports: tuple[int, int]

    @classmethod
    def of(cls, config: GatewayConfig) -> Network:
        return cls(_addresses(config), config.call_announced, config.call_port_range)

    def order_of_ports(self) -> Iterator[int]:
        """Yield the ports to try, from a random one on."""
        low, high = self.ports
        count = high - low + 1
        first = randrange(count)
        for step in range(count):
            yield low + (first + step) % count

    def announce(self, sdp: str) -> str:
        """Return an answer with the announced addresses in place of those that are bound."""
        for address in self.announced:
            version = ipaddress.ip_address(address).version
            pattern = r"\d+\.\d+\.\d+\.\d+" if version == 4 else r"[0-9a-fA-F]*:[0-9a-fA-F:.]*"
            sdp = re.sub(
                rf"(?m)^(a=candidate:\S+ \d udp \d+ ){pattern}( \d+ typ host)",
                rf"\g<1>{address}\g<2>",
                sdp,
            )
        return sdp


def _addresses(config: GatewayConfig) -> tuple[str, ...]:
    """Return the addresses to bind: as configured, that of `--host`, or all of this machine."""
    if config.call_addresses:
        return config.call_addresses
    host = "127.0.0.1" if config.host == "localhost" else config.host.strip("[]")
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return (host,)
    except ValueError:
        pass  # a name
    return tuple(get_host_addresses(use_ipv4=True, use_ipv6=True))
