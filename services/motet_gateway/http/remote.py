"""Fetch images by client-supplied URLs without access to the server's own network.

Names are resolved here, all their addresses are checked, and the connection is made to a checked
address, so that a name whose resolution changes in between (DNS rebinding) has no effect. Every
redirect opens a new connection with the same checks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from motet_shared.errors import BadRequest, PayloadTooLarge

MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
# IPv6 networks that map to an IPv4 address in their last 32 bits, or to a network of the server's
# own. The standard library considers some of them global.
_CLOSED = tuple(
    ipaddress.IPv6Network(net)
    for net in (
        "::/96",  # IPv4-compatible, deprecated (RFC 4291)
        "::ffff:0:0:0/96",  # IPv4-translated (RFC 2765)
        "64:ff9b:1::/48",  # NAT64 of a local network (RFC 8215)
        "100::/64",  # discarded (RFC 6666)
        "2001:db8::/32",  # documentation (RFC 3849)
        "3fff::/20",  # documentation (RFC 9637)
        "5f00::/16",  # segment routing (RFC 9602)
        "fec0::/10",  # site-local, deprecated (RFC 3879)
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)  # bits 64 to 95, before the IPv4 address (RFC 5214)

Allowed = Callable[[str], bool]


def is_public(address: str) -> bool:
    """Return True for a public IP address whose embedded IPv4 addresses are public, too."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if any(found in net for net in _CLOSED) or found.is_site_local:
            return False
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in _NAT64 or (int(found) >> 32) & 0xFFFFFFFF in _ISATAP:
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if not all(is_public(str(one)) for one in inner if one is not None):
            return False
        if found.scope_id is not None:
            return False
    return found.is_global and not found.is_multicast


class _Refused(Exception):
    """Signal an address that must not be contacted."""


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connect to allowed addresses only; raises _Refused for any other."""

    def __init__(self, allowed: Allowed):
        self._allowed = allowed
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(self._allowed(address) for address in addresses):
            raise _Refused(f"{host} does not resolve to public addresses")
        return await self._inner.connect_tcp(
            addresses[0], port, timeout, local_address, socket_options
        )

    async def connect_unix_socket(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        raise _Refused("a Unix socket is not allowed")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def fetch(
    url: str, param: str, *, most: int, seconds: float, allowed: Allowed = is_public
) -> bytes:
    """Return the body of `url`, following up to MAX_REDIRECTS redirects.

    Accepts at most `most` bytes, and takes at most `seconds`. Raises PayloadTooLarge for a larger
    body and BadRequest for any other failure; both name `param`.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _follow(url, param, most, allowed)
    except TimeoutError:
        raise BadRequest(
            f"`{param}`: {url[:200]} did not answer within {seconds:g} s", param=param
        ) from None
    except _Refused as error:
        raise BadRequest(
            f"`{param}`: {error}; send the image as data:image/png;base64,…", param=param
        ) from None
    except (
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
        OSError,
        ValueError,
    ) as error:
        problem = str(error) or type(error).__name__
        raise BadRequest(
            f"`{param}`: {url[:200]} cannot be fetched: {problem}", param=param
        ) from None


async def _follow(url: str, param: str, most: int, allowed: Allowed) -> bytes:
    context = ssl.create_default_context()
    async with httpcore.AsyncConnectionPool(
        ssl_context=context, network_backend=_Guarded(allowed)
    ) as pool:
        for _ in range(MAX_REDIRECTS + 1):
            if not url.isascii():
                message = (
                    f"`{param}`: {url[:200]!a} is not an ASCII URL; "
                    "write the host as xn--… and percent-encode the rest"
                )
                raise BadRequest(message, param=param)
            if urlsplit(url).scheme.lower() not in ("http", "https"):
                raise _Refused(f"{url[:200]} is neither http nor https")
            async with pool.stream(
                "GET", url, headers={"Host": _host(url), "Accept": "image/*"}
            ) as response:
                target = next(
                    (value for name, value in response.headers if name.lower() == b"location"), b""
                )
                if response.status in _REDIRECTS and target:
                    url = urljoin(url, target.decode("latin-1"))
                    continue
                if response.status != 200:
                    raise BadRequest(
                        f"`{param}`: {url[:200]} returned status {response.status}", param=param
                    )
                return await _body(response.aiter_stream(), param, most)
    raise BadRequest(
        f"`{param}`: more than {MAX_REDIRECTS} redirects; give the final URL", param=param
    )


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


async def _body(parts: AsyncIterator[bytes], param: str, most: int) -> bytes:
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) > most:
            raise PayloadTooLarge(
                f"`{param}`: the image has more than {most} bytes (--max-image)", param=param
            )
    return bytes(data)
