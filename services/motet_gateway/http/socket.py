"""Represent one WebSocket connection; what its messages say is the endpoint's concern."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from motet_gateway.kept.session import KEPT_SESSION, ORIGIN, KeptSession
from motet_gateway.tenancy.auth import Caller

from .asgi import ClientGone, Receive, Scope, Send, request_id
from .problems import Problem
from .websocket import BURST, Burst

_SUBPROTOCOL = "realtime"  # of OpenAI's realtime protocol, chosen if the client offers it
_LONGEST_REASON = 120  # characters of a close reason; a close frame holds 123 bytes
_BAD_REQUEST = 4000
# Close codes by the status of the error that ends a connection; registered ones where they exist.
_CLOSE_CODES = {401: 3000, 403: 3000, 429: 1013, 503: 1013}
_DRAINING = 1012
_DESCRIBING = (b"motet-target",)  # headers that describe a session
_decode_origin = msgspec.msgpack.Decoder(tuple[bytes, list[tuple[bytes, bytes]]]).decode


class Socket:
    """Represent one connection. Every method that sends raises ClientGone after the client left."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope = scope
        self.receive = receive
        self.request_id = request_id(scope)
        self.caller: Caller | None = None
        self.served = False  # True once an endpoint reports errors in its own messages
        self._send = send
        self._burst: Burst | None = scope.get("extensions", {}).get(BURST)
        self._kept: KeptSession | None = scope.get("extensions", {}).get(KEPT_SESSION)
        self._turn = asyncio.Lock()  # serializes writers where a write takes more than one step

    @property
    def is_adopted(self) -> bool:
        """Return True if an earlier gateway has served the connection."""
        return self._kept is not None and self._kept.is_adopted

    def memo(self, name: str) -> bytes | None:
        """Return what an earlier gateway has noted of the connection, None without that."""
        return None if self._kept is None else self._kept.memo(name)

    async def open(self) -> None:
        """Complete the upgrade. It always succeeds: browsers do not show a refused one's reason."""
        await self.receive()
        chosen = _SUBPROTOCOL if _SUBPROTOCOL in self.scope.get("subprotocols", ()) else None
        headers = [(b"x-request-id", self.request_id.encode())]
        await self._put({"type": "websocket.accept", "subprotocol": chosen, "headers": headers})

    def keep(self) -> KeptSession | None:
        """Begin to keep what follows beyond the death of this gateway; None if nothing can keep it."""
        if self._kept is not None:
            self._kept.begin()
        return self._kept

    def pass_on(self) -> None:
        """Have the host's other gateways serve the connection, one after the other.

        Returns if all of them have passed it on, or there is no descriptor store. Raises ClientGone if
        another one serves it now.
        """
        if self._kept is not None and self._kept.pass_on():
            raise ClientGone

    async def fail(self, problem: Problem) -> None:
        """Report an error as an `error` event and close the connection."""
        event = {
            "type": "error",
            "event_id": "event_" + secrets.token_hex(6),
            "error": {**problem.as_dict(), "event_id": None},
        }
        text = msgspec.json.encode(event)
        await self.write(lambda: (text,))
        code = _CLOSE_CODES.get(problem.status, _BAD_REQUEST)
        await self.close(_DRAINING if problem.code == "draining" else code, problem.message)

    def go_on(self, kept: KeptSession, sent: int, numbered: int, origin: Scope) -> None:
        """Have this connection keep a session that another one has kept.

        sent, numbered: of its events, as in `KeptSession.move`. origin: scope of the request that
        opened it.
        """
        headers = [(name, value) for name, value in origin["headers"] if name in _DESCRIBING]
        kept.move(
            self._kept, sent, numbered, msgspec.msgpack.encode((origin["query_string"], headers))
        )
        self._kept = kept

    def be_original(self) -> None:
        """Describe the request by which an earlier gateway has opened the session, if it has moved here."""
        if (origin := self.memo(ORIGIN)) is None:
            return
        query, headers = _decode_origin(origin)
        others = [(name, value) for name, value in self.scope["headers"] if name not in _DESCRIBING]
        self.scope = {**self.scope, "query_string": query, "headers": [*others, *headers]}

    @property
    def is_free(self) -> bool:
        """Return True if `write_now` may be called: the client reads, and the connection is not kept."""
        return self._burst is not None and self._kept is None and self._burst.is_free

    def write_now(self, take: Callable[[], Iterable[bytes]]) -> None:
        """Send each text of `take` as a message, at once."""
        assert self._burst is not None
        self._burst.send_now(take)

    async def write(self, take: Callable[[], Iterable[bytes]], *, binary: bool = False) -> None:
        """Send each text of `take` as a message; `take` is called once the client reads.

        binary: they are bytes, not text.
        """
        if self._kept is not None and not self._kept.has_begun:
            self._kept.forget()
        try:
            if self._burst is not None:
                await self._burst.send(take, binary=binary)
            else:
                await self._one_by_one(take, binary)
        except OSError:  # ASGI servers raise it when the peer has left
            raise ClientGone from None

    async def _one_by_one(self, take: Callable[[], Iterable[bytes]], binary: bool) -> None:
        async with self._turn:
            for data in take():
                content = {"bytes": data} if binary else {"text": data.decode()}
                await self._send({"type": "websocket.send", **content})

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
            reason = reason[:_LONGEST_REASON]
            await self._put({"type": "websocket.close", "code": code, "reason": reason})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError:
            raise ClientGone from None
