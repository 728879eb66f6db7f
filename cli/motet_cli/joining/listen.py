"""Read the address of `motet up --listen`, on which other hosts reach a stack."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from motet_cli.supervision import address
from motet_shared.errors import ConfigError

PORT = 4221


@dataclass(frozen=True)
class Listen:
    """Hold where other hosts join a stack: an address of this machine, and two ports.

    port: of `motet join`. nats_port: of NATS.
    """

    host: str
    port: int
    nats_port: int

    @property
    def text(self) -> str:
        """Return HOST:PORT as `motet join` takes it."""
        return host_port(self.host, self.port)

    @property
    def nats_url(self) -> str:
        return f"tls://{host_port(self.host, self.nats_port)}"


def host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_listen(given: str) -> Listen:
    """Return the free ports of ADDRESS[:PORT]; NATS has the next one, or any with port 0.

    Raises ConfigError if the address is not one of this machine alone, or a port is in use.
    """
    host, port = parse_host_port(given, "--listen")
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        unspecified = False
    if unspecified:
        raise ConfigError(
            f"--listen: {host!r} is every address; give the one that other hosts connect to",
            param="--listen",
        )
    try:
        taken = address.free_port(host, port)
        return Listen(host, taken, address.free_port(host, port and port + 1))
    except ConfigError as error:
        raise ConfigError(f"--listen: {error.message}", param="--listen") from None


def parse_host_port(given: str, name: str) -> tuple[str, int]:
    """Return host and port of HOST[:PORT]; without one, the default. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{given}")
        port = PORT if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit("//"), 0
    if not parts.hostname or parts.path or parts.username is not None or port > 65534:
        raise ConfigError(
            f"{name}: {given!r} is no address; give one such as 192.0.2.1:{PORT} or [2001:db8::1]",
            param=name,
        )
    return parts.hostname, port
