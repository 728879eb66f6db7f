"""Accept connections, keep a duplicate of each, and give it to a gateway: to the next one if that dies.

One thread, one selector. The store reads and writes no byte of a connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .frames import BadFrame, Frame, Kind, UnknownKind, close_all, receive, send

log = logging.getLogger(__name__)

MOST = 8192  # connections at a time
MAX_DEATHS = 5  # of gateways that served a connection, within DEATH_WINDOW
DEATH_WINDOW = 60.0  # seconds
ORPHAN_SECONDS = 60.0  # that a connection waits for a gateway
_ACCEPTS = 64  # connections accepted before other events are handled
_QUEUED = 64  # messages that wait for a gateway, from which on it gets no new connection
_PEERCRED = struct.Struct("3i")  # pid, uid, gid
_TICK = 0.5  # seconds between looks at orphans, and before accepting again after an error
_BACKLOG = 16  # gateways that connect at the same time


@dataclass(slots=True, eq=False)
class Gateway:
    """A gateway that has connected to the store."""

    peer: socket.socket
    joined: bool = False
    leaving: bool = False
    held: int = 0  # connections that it serves
    outbox: deque[Frame] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class Kept:
    """A connection: its socket, its memory, and the gateway that serves it."""

    id: int
    socket: int
    memory: int | None = None
    owner: Gateway | None = None
    since: float = 0.0  # without an owner
    deaths: list[float] = field(default_factory=list)  # times of the last ones
    passed_by: list[Gateway] = field(default_factory=list)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.socket,) if self.memory is None else (self.socket, self.memory)


class Store:
    """Serve gateways at the Unix socket `path` with the connections of `listeners`."""

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        path: Path,
        *,
        most: int = MOST,
        orphan_seconds: float = ORPHAN_SECONDS,
        max_deaths: int = MAX_DEATHS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Listen at `path`. Raises OSError if that is not possible."""
        self._listeners, self._path = list(listeners), path
        self._most, self._orphan_seconds, self._clock = most, orphan_seconds, clock
        self._max_deaths = max_deaths
        self._selector = selectors.DefaultSelector()
        self._gateways: list[Gateway] = []
        self.kept: dict[int, Kept] = {}
        self._next = time.time_ns()  # not the ids of an earlier store
        self._accepting = False
        self._accept_again = 0.0  # time until which an error is not met again
        self._entrance = _listen(path)
        self._selector.register(self._entrance, selectors.EVENT_READ, self._on_gateway)
        for listener in self._listeners:
            listener.setblocking(False)

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Serve until `stopped` returns True; it is asked twice a second."""
        while not stopped():
            self.step(_TICK)

    def step(self, timeout: float) -> None:
        """Handle the events that come within `timeout` seconds."""
        self._watch_listeners()
        for key, events in self._selector.select(timeout):
            key.data(events, key.fileobj)
        self._expire()

    def close(self) -> None:
        """Close everything that is kept, which ends the connections that no gateway serves."""
        self._selector.close()
        self._entrance.close()
        self._path.unlink(missing_ok=True)
        for gateway in self._gateways:
            gateway.peer.close()
        for kept in self.kept.values():
            close_all(kept.fds)
        self.kept.clear()

    # ---------------------------------------------------------------------------------------------------- connections
    def _watch_listeners(self) -> None:
        """Accept only what can be given to a gateway; the rest waits in the kernel's queue."""
        wanted = (
            len(self.kept) < self._most
            and self._clock() >= self._accept_again
            and self._least_busy() is not None
        )
        if wanted == self._accepting:
            return
        self._accepting = wanted
        for listener in self._listeners:
            if wanted:
                self._selector.register(listener, selectors.EVENT_READ, self._on_connection)
            else:
                self._selector.unregister(listener)

    def _on_connection(self, events: int, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            gateway = self._least_busy()
            if gateway is None or len(self.kept) >= self._most:
                return
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("cannot accept: %s", error)
                self._accept_again = self._clock() + _TICK
                return
            self._next += 1
            kept = self.kept[self._next] = Kept(self._next, accepted.detach())
            self._give(kept, gateway)

    def _give(self, kept: Kept, gateway: Gateway) -> None:
        kept.owner = gateway
        gateway.held += 1
        self._send(gateway, Frame(Kind.GIVE, kept.id, len(kept.deaths), kept.fds))

    def _pass(self, kept: Kept, gateway: Gateway) -> None:
        """Give a connection to a gateway that has not passed it on, else back to this one."""
        if kept.memory is None:  # what was read of it is lost
            self._drop(kept)
            return
        kept.passed_by.append(gateway)
        other = _fewest(one for one in self._able() if one not in kept.passed_by)
        if other is not None:
            gateway.held -= 1
            self._give(kept, other)
        else:
            self._send(gateway, Frame(Kind.RETURN, kept.id, fds=kept.fds))

    def _drop(self, kept: Kept) -> None:
        del self.kept[kept.id]
        if kept.owner is not None:
            kept.owner.held -= 1
            kept.owner.outbox = deque(one for one in kept.owner.outbox if one.id != kept.id)
        close_all(kept.fds)

    def _least_busy(self) -> Gateway | None:
        return _fewest(one for one in self._able() if len(one.outbox) < _QUEUED)

    def _able(self) -> list[Gateway]:
        return [one for one in self._gateways if one.joined and not one.leaving]

    def _expire(self) -> None:
        now = self._clock()
        orphans = [kept for kept in self.kept.values() if kept.owner is None]
        for kept in orphans:
            if now - kept.since > self._orphan_seconds:
                log.warning("connection %d had no gateway for %.0f s", kept.id, now - kept.since)
                self._drop(kept)

    # ------------------------------------------------------------------------------------------------------- gateways
    def _on_gateway(self, events: int, entrance: socket.socket) -> None:
        try:
            peer, _ = entrance.accept()
        except OSError:
            return
        _, uid, _ = _PEERCRED.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        )
        if uid not in (os.getuid(), 0):
            peer.close()
            return
        peer.setblocking(False)
        gateway = Gateway(peer)
        self._gateways.append(gateway)
        self._selector.register(
            peer, selectors.EVENT_READ, lambda events, _: self._on_events(gateway, events)
        )

    def _on_events(self, gateway: Gateway, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(gateway)
        if not events & selectors.EVENT_READ or gateway not in self._gateways:
            return
        try:
            frame = receive(gateway.peer)
        except (BlockingIOError, UnknownKind):
            return
        except ConnectionResetError:
            return  # told once: what the gateway had sent follows, then its end
        except (OSError, BadFrame) as error:
            log.warning("a gateway is cut off: %s", error)
            frame = None
        if frame is None:
            self._lose(gateway)
        else:
            self._handle(gateway, frame)

    def _handle(self, gateway: Gateway, frame: Frame) -> None:
        kept = self.kept.get(frame.id)
        if frame.kind is Kind.JOIN:
            gateway.joined = True
            self._give_orphans()
        elif frame.kind is Kind.LEAVE:
            gateway.leaving = True
        elif frame.kind is Kind.PUT and kept is None and len(self.kept) < self._most:
            taken, memory = frame.fds
            self.kept[frame.id] = Kept(frame.id, taken, memory, gateway)
            gateway.held += 1
        elif frame.kind is Kind.KEEP and kept is not None and kept.owner is gateway:
            close_all([kept.memory] if kept.memory is not None else [])
            kept.memory = frame.fds[0]
        elif frame.kind is Kind.DROP and kept is not None and kept.owner is gateway:
            self._drop(kept)
        elif frame.kind is Kind.PASS and kept is not None and kept.owner is gateway:
            self._pass(kept, gateway)
        else:
            close_all(frame.fds)

    def _lose(self, gateway: Gateway) -> None:
        """Give the connections of a gateway that has ended to others."""
        self._selector.unregister(gateway.peer)
        gateway.peer.close()
        self._gateways.remove(gateway)
        now = self._clock()
        for kept in self.kept.values():
            kept.passed_by.clear()  # its sessions will be in others
        for kept in [one for one in self.kept.values() if one.owner is gateway]:
            kept.owner, kept.since = None, now
            if not gateway.leaving:
                recent = [one for one in kept.deaths if now - one <= DEATH_WINDOW]
                kept.deaths = [*recent, now]
            if len(kept.deaths) >= self._max_deaths:
                log.warning("connection %d is given up: %d deaths", kept.id, len(kept.deaths))
                self._drop(kept)
        self._give_orphans()

    def _give_orphans(self) -> None:
        for kept in [one for one in self.kept.values() if one.owner is None]:
            gateway = _fewest(self._able())
            if gateway is None:
                return
            self._give(kept, gateway)

    def _send(self, gateway: Gateway, frame: Frame) -> None:
        gateway.outbox.append(frame)
        self._flush(gateway)

    def _flush(self, gateway: Gateway) -> None:
        events = selectors.EVENT_READ
        while gateway.outbox:
            try:
                send(gateway.peer, gateway.outbox[0])
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
                    events |= selectors.EVENT_WRITE
                break  # another error: the end of the gateway is read next
            gateway.outbox.popleft()
        key = self._selector.get_key(gateway.peer)
        if key.events != events:
            self._selector.modify(gateway.peer, events, key.data)


def _fewest(gateways: Iterable[Gateway]) -> Gateway | None:
    """Return the gateway that serves the fewest connections; None if there is no gateway."""
    return min(gateways, key=lambda one: one.held, default=None)


def _listen(path: Path) -> socket.socket:
    """Return a Unix socket at `path`, in place of one that an earlier store has left."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    entrance = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        before = os.umask(0o177)
        try:
            entrance.bind(str(path))
        finally:
            os.umask(before)
        entrance.listen(_BACKLOG)
        entrance.setblocking(False)
    except OSError:
        entrance.close()
        raise
    return entrance
