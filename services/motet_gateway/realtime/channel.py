"""What the server says on the socket: events with ids of their own, several in one write."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from ..asgi import ClientGone, Headers, Scope, Send
from ..problems import Problem
from ..websocket import BURST

_encode = msgspec.json.Encoder().encode


class Channel:
    """The sending half of one socket."""

    def __init__(self, scope: Scope, send: Send):
        self._send = send
        self._send_texts = scope.get("extensions", {}).get(BURST) or self._one_by_one
        self._prefix = b"event_" + secrets.token_hex(6).encode() + b"_"
        self._count = 0
        self.closed = False

    async def accept(self, subprotocol: str | None, headers: Headers) -> None:
        """Complete the upgrade."""
        await self._put({"type": "websocket.accept", "subprotocol": subprotocol, "headers": headers})

    def next_id(self) -> bytes:
        self._count += 1
        return b"%s%d" % (self._prefix, self._count)

    def event(self, kind: str, **fields: Any) -> bytes:
        """A rendered event."""
        return _encode({"type": kind, "event_id": self.next_id().decode(), **fields})

    def error(self, problem: Problem, event_id: str | None = None) -> bytes:
        return self.event("error", error={**problem.as_dict(), "event_id": event_id})

    async def send(self, *events: bytes) -> None:
        """Send rendered events in one write, each a message of its own; waits while the client does not read."""
        if self.closed:
            raise ClientGone
        try:
            await self._send_texts(events)
        except OSError:  # how ASGI servers say that the peer has left
            raise ClientGone from None

    async def _one_by_one(self, events: Iterable[bytes]) -> None:
        for text in events:
            await self._send({"type": "websocket.send", "text": text.decode()})

    async def close(self, code: int, reason: str = "") -> None:
        if not self.closed:
            self.closed = True
            await self._put({"type": "websocket.close", "code": code, "reason": reason[:120]})

    async def _put(self, message: dict[str, Any]) -> None:
        try:
            await self._send(message)
        except OSError:
            raise ClientGone from None


class Deltas:
    """A pre-rendered stream of delta events: only event id and text vary. The hot path of the socket."""

    def __init__(self, channel: Channel, kind: str, **fields: Any):
        marked = _encode({"type": kind, "event_id": "\x00id", **fields, "delta": "\x00delta"})
        self._before, rest = marked.split(b"\\u0000id", 1)
        self._between, self._after = rest.split(_encode("\x00delta"), 1)
        self._channel = channel

    def render(self, text: str) -> bytes:
        return b"".join((self._before, self._channel.next_id(), self._between, _encode(text), self._after))
