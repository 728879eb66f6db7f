"""Determine the address that a connection or request comes from."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from motet_shared.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_V6_PREFIX = 64  # bits; the usual allocation of one subscriber counts as one address
_HOP = re.compile(r"\[([0-9a-fA-F:.]+)\](?::\d+)?|([0-9.]+)(?::\d+)?|([0-9a-fA-F:.]+)")


def parse(text: str) -> Address | None:
    """Return the IP address in `text`, or None if there is none.

    An IPv4-mapped address is returned as IPv4; a zone is dropped.
    """
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (
        (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
    )


def counted(address: Address) -> str:
    """Return the name under which an address is counted; IPv6 addresses by their /64."""
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _V6_PREFIX), strict=False))


class TrustedProxies:
    """Hold the networks of proxies whose X-Forwarded-For is trusted.

    Raises ConfigError for an entry that is not a network.
    """

    def __init__(self, networks: Iterable[str]):
        self._networks = [_network(text) for text in networks]

    def __contains__(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def client(self, peer: Address, forwarded: str) -> Address:
        """Return the last hop in `forwarded` that is not a trusted proxy.

        `forwarded` is the joined X-Forwarded-For fields. Anything before that hop was written by
        the client. If there is no such hop, or it is not an address, the last known proxy is
        returned.
        """
        known = peer
        for hop in reversed(forwarded.split(",")):
            if known not in self:
                break
            found = _HOP.fullmatch(hop.strip())
            address = parse(next(filter(None, found.groups()))) if found else None
            if address is None:
                break
            known = address
        return known


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        message = f"trusted_proxies: {text!r} is not a network ({error}); give one such as 10.0.0.0/8, or an address"
        raise ConfigError(message, param="trusted_proxies") from None
