"""Send messages on one client connection; their content is the channel's concern."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from motet_gateway.http.asgi import ClientGone, Headers, Scope, Send
from motet_gateway.http.websocket import BURST, Burst


class Socket:
    """Send on one connection. Raises ClientGone once the client has left."""

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self._burst: Burst | None = scope.get("extensions", {}).get(BURST)
        self._turn = asyncio.Lock()  # serializes writers where a write takes more than one step

    async def accept(self, subprotocol: str | None, headers: Headers) -> None:
        """Complete the upgrade."""
        await self._put(
            {"type": "websocket.accept", "subprotocol": subprotocol, "headers": headers}
        )

    async def write(self, take: Callable[[], Iterable[bytes]]) -> None:
        """Send each text of `take` as a message; `take` is called once the client reads."""
        try:
            if self._burst is not None:
                await self._burst.send(take)
            else:
                await self._one_by_one(take)
        except OSError:  # ASGI servers raise it when the peer has left
            raise ClientGone from None

    async def _one_by_one(self, take: Callable[[], Iterable[bytes]]) -> None:
        async with self._turn:
            for text in take():
                await self._send({"type": "websocket.send", "text": text.decode()})

    def ask(self, mark: int) -> None:
        """Call `on_arrived` with `mark` once all sent data has arrived, if the server can tell."""
        if self._burst is not None:
            self._burst.ask(mark)

    def on_arrived(self, tell: Callable[[int], None]) -> None:
        if self._burst is not None:
            self._burst.on_arrived = tell

    async def close(self, code: int, reason: str = "") -> None:
        """Close with a code if the client reads, else drop the connection at once."""
        if self._burst is not None and self._burst.clogged:
            self._burst.drop()
        else:
            await self._put({"type": "websocket.close", "code": code, "reason": reason[:120]})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError:
            raise ClientGone from None
