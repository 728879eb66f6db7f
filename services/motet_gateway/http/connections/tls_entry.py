"""Count TLS connections, and limit their time, before their handshake."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from motet_gateway.http.problems import TooManyConnections

from .bounds import BoundedState
from .protocol import BoundedProtocol, peer_of


class TlsEntry(asyncio.Protocol):
    """Perform the TLS handshake, then pass the connection to the protocol made by `make`."""

    def __init__(
        self, state: BoundedState, context: ssl.SSLContext, make: Callable[[], BoundedProtocol]
    ):
        self._state, self._context, self._make = state, context, make
        self._early = b""  # data received with the end of the handshake
        self._lost = False
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._shaking is None:  # else this is the call for the TLS transport
            self._shaking = asyncio.get_running_loop().create_task(
                self._shake(transport), name="tls"
            )

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    async def _shake(self, transport: Any) -> None:
        loop, limit = asyncio.get_running_loop(), self._state.bounds.head_seconds
        try:
            lease = self._state.counts.connect(peer_of(transport))
        except TooManyConnections:
            transport.abort()
            return
        try:
            secure = await loop.start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=limit,
                ssl_shutdown_timeout=limit,
            )
        except (OSError, TimeoutError):  # ssl.SSLError is an OSError
            secure = None
        if secure is None or self._lost:
            lease.release()
            transport.abort()
            return
        protocol = self._make()
        protocol.lease = lease
        secure.set_protocol(protocol)
        protocol.connection_made(secure)
        if self._early:
            protocol.data_received(self._early)
