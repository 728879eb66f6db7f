"""Check addresses to listen on before any process is started."""

from __future__ import annotations

import errno
import ipaddress
import socket
from urllib.parse import urlsplit

from motet_shared.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def local_view(host: str) -> str:
    """Return the address under which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def of_url(url: str) -> tuple[str, int]:
    """Return host and port of http(s)://host[:port]. Raises ConfigError for other texts."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        raise ConfigError(
            f"--url: {url!r} is not an http or https URL; give one such as http://127.0.0.1:8000",
            param="--url",
        ) from None
    return parts.hostname or "", port


def url(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def free_port(host: str, port: int = 0) -> int:
    """Return `port` if it is free, or any free port for 0. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        raise ConfigError(
            f"--host: {host!r} cannot be resolved; give an address of this machine", param="--host"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise _refusal(host, port, error) from None
        return int(probe.getsockname()[1])


def bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, for other processes to listen on.

    Connections are refused until one of them listens. Raises ConfigError.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(where)
    except OSError as error:
        taken.close()
        raise _refusal(host, port, error) from None
    return taken


def _refusal(host: str, port: int, error: OSError) -> ConfigError:
    """Return the error for an address that cannot be bound."""
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"--host: {host!r} is not an address of this machine; give one that is", param="--host"
        )
    reasons = {
        errno.EADDRINUSE: f"{port} on {host} is in use; end the server there or choose another port",
        errno.EACCES: f"{port} needs privileges; choose one above 1023",
    }
    other = f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
    return ConfigError(f"--port: {reasons.get(error.errno or 0, other)}", param="--port")
