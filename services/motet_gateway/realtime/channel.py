"""What the server says in a session: events with ids of their own, in one order, over whatever socket there is."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec

from ..asgi import ClientGone
from ..problems import Problem
from .event_log import EventLog
from .socket import Socket

_encode = msgspec.json.Encoder().encode


class Channel:
    """The sending half of a session. While no client is there, events wait; ClientGone once it is closed."""

    def __init__(self, socket: Socket, memory: int):
        """`memory`: bytes of events that are kept for a client that comes back."""
        self._prefix = b"event_" + secrets.token_hex(6).encode() + b"_"
        self._count = 0
        self.closed = False
        self._log = EventLog(memory)
        self._socket: Socket | None = None
        self._changed = asyncio.Event()  # set while there is a socket, and once it is closed
        self._away_since, self._away = time.monotonic(), 0.0  # seconds
        self.attach(socket)

    def next_id(self) -> bytes:
        self._count += 1
        return b"%s%d" % (self._prefix, self._count)

    def event(self, kind: str, **fields: Any) -> bytes:
        """A rendered event."""
        return _encode({"type": kind, "event_id": self.next_id().decode(), **fields})

    def error(self, problem: Problem, event_id: str | None = None) -> bytes:
        return self.event("error", error={**problem.as_dict(), "event_id": event_id})

    async def send(self, *events: bytes) -> None:
        """Say these, in one write if they are few, each as a message of its own; waits while the client does not read.

        Without a client it waits only when too much has been said.
        """
        if self.closed:
            raise ClientGone
        self._log.add(events)
        while self._log.waiting:
            if (socket := self._socket) is not None:
                await self._write(socket)
            elif self._log.full:
                await self._changed.wait()
            else:
                return
            if self.closed:
                raise ClientGone

    async def _write(self, socket: Socket) -> None:
        try:
            await socket.write(self._log.take)
        except ClientGone:
            self.detach(socket)
            return
        if self._log.unsure:
            socket.ask(self._log.count)

    async def close(self, code: int, reason: str = "") -> None:
        """Nothing more is said. Closes the socket, if there is one."""
        if self.closed:
            return
        self.closed = True
        self._changed.set()
        if self._socket is not None:
            await self._socket.close(code, reason)

    # ------------------------------------------------------------------------------------------- clients come and go
    @property
    def present_seconds(self) -> float:
        """A clock that stands still while no client is there."""
        now = time.monotonic()
        return now - self._away - (now - self._away_since if self._socket is None else 0.0)

    def check(self, after: str | None) -> None:
        """EventNotFound if a client that saw this event last cannot have what followed."""
        self._log.check(after)

    def attach(self, socket: Socket, after: str | None = None) -> None:
        """This is the client from now on; the next `send` begins with what followed the event `after`."""
        self._log.rewind(after)
        socket.on_arrived(self._log.arrived)
        self._away += time.monotonic() - self._away_since
        self._socket = socket
        self._changed.set()

    def detach(self, socket: Socket) -> None:
        """The client on this socket is gone, if it is still the one."""
        if self._socket is socket:
            socket.on_arrived(lambda mark: None)
            self._socket, self._away_since = None, time.monotonic()
            if not self.closed:
                self._changed.clear()


class Deltas:
    """A pre-rendered stream of delta events: only event id and text vary. The hot path of the socket."""

    def __init__(self, channel: Channel, kind: str, **fields: Any):
        marked = _encode({"type": kind, "event_id": "\x00id", **fields, "delta": "\x00delta"})
        self._before, rest = marked.split(b"\\u0000id", 1)
        self._between, self._after = rest.split(_encode("\x00delta"), 1)
        self._channel = channel

    def render(self, text: str) -> bytes:
        return b"".join((self._before, self._channel.next_id(), self._between, _encode(text), self._after))
