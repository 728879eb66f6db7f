"""Send a session's server events, numbered and in one order, over its current socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from motet_gateway.http.asgi import ClientGone, Scope
from motet_gateway.http.problems import Problem
from motet_gateway.kept import draws
from motet_gateway.kept.session import KeptSession

from .event_log import EventLog, LogState

_encode = msgspec.json.Encoder().encode
_DELTA, _TYPE = b'.delta"', 96  # the end of a type; bytes of an event that contain its type


class Connection(Protocol):
    """Describe a client's connection: a WebSocket, or the data channel of a call.

    scope: of the request that opened it. What sends raises ClientGone after the client has left.
    """

    scope: Scope

    @property
    def is_free(self) -> bool:
        """Return True if `write_now` may be called: the connection is open, and the client reads."""

    def write_now(self, take: Callable[[], Iterable[bytes]]) -> None:
        """Send each text of `take` as a message, at once."""

    async def write(self, take: Callable[[], Iterable[bytes]]) -> None:
        """Send each text of `take` as a message; `take` is called once the client reads."""

    def ask(self, mark: int) -> None:
        """Call what `on_arrived` was given with `mark` once all sent data has arrived."""

    def on_arrived(self, tell: Callable[[int], None]) -> None:
        """Set what is called with marks."""

    async def close(self, code: int, reason: str = "") -> None:
        """Close with a code of the WebSocket protocol."""


class ChannelState(msgspec.Struct, frozen=True):
    """The prefix of event ids, and the events that are kept."""

    prefix: bytes
    log: LogState


class Channel:
    """Send the events of a session; they wait while no client is attached.

    Raises ClientGone once the channel is closed.
    """

    def __init__(
        self, socket: Connection, memory: int, keep: float, kept: KeptSession | None = None
    ):
        """Start with `socket`; keep `memory` bytes of events for a client that reconnects.

        keep: seconds in which it may, after which nothing waits for it any more.
        kept: what has the events that an earlier gateway sent, if another can go on.
        """
        self._prefix = b"event_" + draws.token_hex(6).encode() + b"_"
        self._keep, self._kept = keep, kept
        self._count = 0 if kept is None else kept.numbered
        self._sequence = ""  # of the events that are rendered now
        self._rendered: list[tuple[int, str]] = []  # number and sequence of those not added yet
        self.closed = False
        self._log = EventLog(memory, 0 if kept is None else kept.sent)
        self._socket: Connection | None = None
        self._changed = asyncio.Event()  # set while there is a socket, and once it is closed
        self._away_since, self._away = time.monotonic(), 0.0  # seconds
        self.attach(socket)

    def state(self) -> ChannelState:
        return ChannelState(self._prefix, self._log.state())

    def restore(self, state: ChannelState) -> None:
        self._prefix = state.prefix
        self._log.resume(state.log)

    @contextmanager
    def rendering(self, sequence: str) -> Iterator[None]:
        """Number the events that are rendered in the block as a part of this sequence.

        The events of a sequence come in one order in each process; those of others, in between.
        """
        self._sequence, self._rendered = sequence, []
        try:
            yield
        finally:
            self._sequence = ""

    def next_id(self) -> bytes:
        number = None if self._kept is None else self._kept.known(self._sequence)
        if number is None:
            self._count += 1
            number = self._count
        if self._kept is not None:
            self._rendered.append((number, self._sequence))
        return b"%s%d" % (self._prefix, number)

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return a rendered event."""
        return _encode({"type": kind, "event_id": self.next_id().decode(), **fields})

    def error(self, problem: Problem, event_id: str | None = None) -> bytes:
        return self.event("error", error={**problem.as_dict(), "event_id": event_id})

    async def send(self, *events: bytes) -> None:
        """Add events and flush. Raises ClientGone if the channel is closed."""
        self.add(events)
        await self.flush()

    def add(self, events: Iterable[bytes]) -> None:
        """Queue events for the next flush. Raises ClientGone if the channel is closed."""
        rendered, self._rendered = self._rendered, []
        if self.closed:
            raise ClientGone
        if self._kept is None:
            self._log.add(events)
        else:
            self._log.add(self._unsent(self._kept, list(events), rendered))

    def _unsent(
        self, kept: KeptSession, events: list[bytes], rendered: list[tuple[int, str]]
    ) -> list[bytes]:
        """Return the events to send: those that no earlier gateway has sent to this socket."""
        unsent: list[bytes] = []
        new, first, steps = [], 0, 0
        for event, (number, sequence) in zip(events, rendered, strict=True):
            is_delta = _DELTA in event[:_TYPE]
            steps += not is_delta
            if number > kept.numbered:
                first = first or number
                new.append((sequence, is_delta))
            if number > kept.sent:
                unsent += kept.in_order(number, event)
            elif number:
                self._log.restore(number, event)
        if new:
            kept.render(first, new)
        kept.tick(len(events), steps)
        return unsent

    def _take(self) -> list[bytes]:
        taken = self._log.take()
        if self._kept is not None:
            self._kept.send(self._log.count)
        return taken

    async def flush(self) -> None:
        """Send what is queued, each event as a message of its own, in one write if they are few.

        Waits while the client does not read; without a client, only if the event log is full.
        Raises ClientGone if the channel is closed.
        """
        while self._log.waiting:
            if (socket := self._socket) is not None:
                await self._write(socket)
            elif self._log.full:
                await self._wait_for_client()
            else:
                return
            if self.closed:
                raise ClientGone

    async def _wait_for_client(self) -> None:
        """Wait for a socket. Raises ClientGone if there is none within the time of a reconnection."""
        try:
            async with asyncio.timeout(self._keep):
                await self._changed.wait()
        except TimeoutError:
            raise ClientGone from None

    @property
    def is_free(self) -> bool:
        """Return True if events that are added now can be sent at once, with `flush_now`."""
        socket = self._socket
        return (
            socket is not None
            and self._kept is None
            and not (self.closed or self._log.waiting)
            and socket.is_free
        )

    @property
    def is_waiting(self) -> bool:
        """Return True if events were added that are not sent."""
        return self._log.waiting

    def flush_now(self) -> None:
        """Send what was added since the channel `is_free`, or the first part of it if it is much."""
        if (socket := self._socket) is not None and self._log.waiting:
            socket.write_now(self._take)
            self._ask(socket)

    async def _write(self, socket: Connection) -> None:
        try:
            await socket.write(self._take)
        except ClientGone:
            self.detach(socket)
            return
        self._ask(socket)

    def _ask(self, socket: Connection) -> None:
        if self._log.unsure:
            socket.ask(self._log.count)

    async def close(self, code: int, reason: str = "") -> None:
        """Send nothing more, and close the socket if there is one."""
        if self.closed:
            return
        self.closed = True
        self._changed.set()
        if self._socket is not None:
            await self._socket.close(code, reason)

    # ------------------------------------------------------------------------- attach and detach
    @property
    def present_seconds(self) -> float:
        """Return the seconds of a clock that stops while no client is attached."""
        now = time.monotonic()
        return now - self._away - (now - self._away_since if self._socket is None else 0.0)

    @property
    def place(self) -> tuple[int, int]:
        """Return how many events were sent to the client as it is now, and how many have a number."""
        return self._log.count, self._count

    def check(self, after: str | None) -> None:
        """Raise EventNotFound if a client that saw event `after` last cannot have what followed."""
        self._log.check(after)

    def attach(self, socket: Connection, after: str | None = None) -> None:
        """Attach a client's socket; the next `send` begins with what followed the event `after`."""
        self._log.rewind(after)
        socket.on_arrived(self._log.arrived)
        self._away += time.monotonic() - self._away_since
        self._socket = socket
        self._changed.set()

    def detach(self, socket: Connection) -> None:
        """Detach the client on this socket, if it is still the attached one."""
        if self._socket is socket:
            socket.on_arrived(lambda mark: None)
            self._socket, self._away_since = None, time.monotonic()
            if not self.closed:
                self._changed.clear()


class Deltas:
    """Render a stream of delta events that differ in event id and text alone: the hot path."""

    def __init__(self, channel: Channel, kind: str, **fields: Any):
        marked = _encode({"type": kind, "event_id": "\x00id", **fields, "delta": "\x00delta"})
        self._before, rest = marked.split(b"\\u0000id", 1)
        self._between, self._after = rest.split(_encode("\x00delta"), 1)
        self._channel = channel

    def render(self, text: str) -> bytes:
        return b"".join(
            (self._before, self._channel.next_id(), self._between, _encode(text), self._after)
        )
