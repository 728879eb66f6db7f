"""Check the `Host` header of requests against the names under which this server is reachable.

A page of any site can have its own name resolve to a loopback or private address (DNS rebinding).
Its requests then reach this server with an `Origin` that equals the `Host`; only the name
distinguishes them from requests of the server's own page. An IP literal needs no name resolution,
and loopback names are never resolved by a site's name server (RFC 6761).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache

from motet_shared.errors import BadRequest, ConfigError

from .asgi import Scope
from .problems import HostNotAllowed

ANY = "*"
_CHECKED = "motet.host"  # key in the scope of a request
_NETLOC = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+))(:[0-9]{1,5})?")
_NAME = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_CACHED = 1024  # distinct values of `Host`


class Hosts:
    """Accept IP literals, loopback names, the machine's name and the names in `allowed`.

    `*.name` accepts any subdomain, `*` every name. Ports, case and a trailing dot are ignored.
    Raises ConfigError for an entry that is not a host name.
    """

    def __init__(self, allowed: tuple[str, ...], listening: str = ""):
        names = {_entry(name) for name in allowed if name != ANY}
        self._any = ANY in allowed
        self._names = {name for name in names if not name.startswith("*.")}
        self._names |= {socket.gethostname().lower(), listening.lower()} - {""}
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._checked = lru_cache(_CACHED)(self._check)

    def check(self, scope: Scope) -> None:
        """Validate the `Host` header and store it in the scope for `checked_host`.

        Raises BadRequest if it is missing, repeated or malformed, HostNotAllowed if it is not a
        name of this server.
        """
        given = [value for name, value in scope["headers"] if name == b"host"]
        if len(given) != 1:
            what = "missing" if not given else "given more than once"
            raise BadRequest(f"the header `Host` is {what}; send exactly one", param="Host")
        scope[_CHECKED] = self._checked(given[0])

    def _check(self, given: bytes) -> str:
        """Return host and port in lower case, as they appear in a URL."""
        text = given.decode("latin-1").lower()
        found = _NETLOC.fullmatch(text)
        if found is None:
            raise BadRequest(
                f"the header `Host` is {text[:100]!r}, which is not a valid host; send HOST:PORT",
                param="Host",
            )
        address, name, _ = found.groups()
        host = address or name.removesuffix(".")
        if not (self._any or (_is_address(host) if address else self._is_known(host))):
            message = (
                f"{host[:100]!r} is not a name of this server; "
                "allow it with --allowed-hosts (MOTET_ALLOWED_HOSTS)"
            )
            raise HostNotAllowed(message, param="Host")
        return text

    def _is_known(self, name: str) -> bool:
        loopback = name == "localhost" or name.endswith(".localhost")
        return loopback or _is_address(name) or name in self._names or name.endswith(self._suffixes)


def checked_host(scope: Scope) -> str:
    """Return the host and port that the client used; requires a previous `Hosts.check`."""
    host: str = scope[_CHECKED]
    return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _entry(given: str) -> str:
    """Normalize an entry of --allowed-hosts: lower case, without port and trailing dot.

    Raises ConfigError if it is not a host name.
    """
    name = re.sub(r":[0-9]+$", "", given.lower()).removesuffix(".")
    if not _NAME.fullmatch(name):
        message = f"allowed_hosts: {given!r} is not a host name"
        message += "; give names such as chat.example or *.example, or * for all"
        raise ConfigError(message, param="allowed_hosts")
    return name
