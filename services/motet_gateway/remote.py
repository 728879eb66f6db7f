"""Fetches images by URLs that clients send, and never lets them reach into the server's own network.

Names are resolved here, all of their addresses are looked at, and the connection goes to an address that was looked at:
a name that changes its mind in between changes nothing. Every redirect is a connection of its own.
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
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Allowed = Callable[[str], bool]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open Internet, through whatever it is wrapped in."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = [found.ipv4_mapped, found.sixtofour, *(found.teredo or ())]
        if found in _NAT64:
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if not all(is_public(str(one)) for one in inner if one is not None):
            return False
        if found.scope_id is not None:
            return False
    return found.is_global and not found.is_multicast


class _Refused(Exception):
    """An address that must not be reached."""


class _Guarded(httpcore.AsyncNetworkBackend):
    """Connects to addresses that are allowed, and to no others."""

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
            raise _Refused(f"{host} is not on the open Internet")
        return await self._inner.connect_tcp(addresses[0], port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        raise _Refused("a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def fetch(url: str, param: str, *, most: int, seconds: float, allowed: Allowed = is_public) -> bytes:
    """The body behind `url`, redirects followed. BadRequest names `param` for all that can go wrong."""
    try:
        async with asyncio.timeout(seconds):
            return await _follow(url, param, most, allowed)
    except TimeoutError:
        raise BadRequest(f"`{param}`: {url[:200]} did not answer within {seconds:g} s", param=param) from None
    except _Refused as error:
        raise BadRequest(f"`{param}`: {error}; send the image as data:image/png;base64,…", param=param) from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, OSError, ValueError) as error:
        problem = str(error) or type(error).__name__
        raise BadRequest(f"`{param}`: {url[:200]} cannot be fetched: {problem}", param=param) from None


async def _follow(url: str, param: str, most: int, allowed: Allowed) -> bytes:
    context = ssl.create_default_context()
    async with httpcore.AsyncConnectionPool(ssl_context=context, network_backend=_Guarded(allowed)) as pool:
        for _ in range(MAX_REDIRECTS + 1):
            if urlsplit(url).scheme.lower() not in ("http", "https"):
                raise _Refused(f"{url[:200]} is neither http nor https")
            async with pool.stream("GET", url, headers={"Host": _host(url), "Accept": "image/*"}) as response:
                target = next((value for name, value in response.headers if name.lower() == b"location"), b"")
                if response.status in _REDIRECTS and target:
                    url = urljoin(url, target.decode("latin-1"))
                    continue
                if response.status != 200:
                    raise BadRequest(f"`{param}`: {url[:200]} answers {response.status}", param=param)
                return await _body(response.aiter_stream(), param, most)
    raise BadRequest(f"`{param}`: leads through more than {MAX_REDIRECTS} redirects", param=param)


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


async def _body(parts: AsyncIterator[bytes], param: str, most: int) -> bytes:
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) > most:
            raise PayloadTooLarge(f"`{param}`: the image has more than {most} bytes (--max-image)", param=param)
    return bytes(data)
