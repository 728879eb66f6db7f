"""Take connections from the descriptor store, and give it what it has to keep."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import stat
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_fdstore.client import StoreClient
from motet_fdstore.frames import BadFrame, Frame, Kind, close_all

from . import kernel_counts
from .absent import AbsentTransport, Arrivals
from .memory import BadMemory, ConnectionMemory
from .moves import is_whole
from .transport import KeptConnection

log = logging.getLogger(__name__)

_RETRY = 0.1  # seconds between two attempts to reach the store
_MOST = 64  # connections taken before the loop does something else


def adopted(fd: int, peer: socket.socket | None) -> ConnectionMemory:
    """Return the memory of a connection that another gateway has served.

    One whose client has left its session is away then, also if that gateway has not noticed it. peer:
    None if it has. Raises OSError and BadMemory; `fd` is then still the caller's.
    """
    if peer is None:
        return ConnectionMemory.adopt(fd, 0, 0)
    consumed, taken = kernel_counts.consumed(peer), kernel_counts.taken(peer)
    is_over, was_reset = kernel_counts.is_over(peer), kernel_counts.was_reset(peer)
    memory = ConnectionMemory.adopt(fd, consumed, taken)
    if is_over and memory.is_lasting:
        if not was_reset:
            with contextlib.suppress(OSError):
                while count := peer.recv_into(memory.buffer()):
                    memory.took(count)
        elif is_whole(memory.received() + memory.buffer()[:1]):
            memory.took(1)
        memory.set_away()
    return memory


@dataclass(slots=True, eq=False)
class _Held:
    """What the store keeps under an id: memory and its connection; None: the client is away."""

    id: int
    memory: ConnectionMemory
    peer: socket.socket | None
    is_arriving: bool = False  # its session is not known here yet
    is_returned: bool = False  # all gateways have passed it on

    @property
    def fds(self) -> tuple[int, int]:
        return self.memory.fd if self.peer is None else self.peer.fileno(), self.memory.fd


class Intake:
    """Serve the connections of the store at `path`, each with a protocol of `make`.

    arrivals: of sessions whose clients are away.
    """

    def __init__(
        self,
        path: Path,
        make: Callable[[], asyncio.Protocol],
        arrivals: Arrivals | None = None,
    ):
        self._path, self._make = path, make
        self._arrivals = arrivals or Arrivals()
        self._store: StoreClient | None = None
        self._held: dict[int, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False
        self.adopted = 0  # connections that another gateway has served before

    async def start(self) -> None:
        """Connect to the store; waits for it without a limit."""
        for attempt in itertools.count():
            if self._connect():
                return
            if attempt == 0:
                log.warning("no descriptor store at %s yet", self._path)
            await asyncio.sleep(_RETRY)

    def leave(self) -> None:
        """Take no more connections; those here are still served."""
        self._leaving = True
        if self._store is not None:
            self._store.leave()

    def close(self) -> None:
        """Leave the store, which gives the connections that are still served to another gateway."""
        self._leaving = True
        for task in self._tasks:
            task.cancel()
        if self._store is not None:
            self._disconnect(self._store)

    # ------------------------------------------------------------------------------------------------------ the store
    def _connect(self) -> bool:
        try:
            store = self._store = StoreClient(self._path)
        except OSError:
            return False
        for held in self._held.values():
            store.put(held.id, *held.fds)
        if self._leaving:
            store.leave()
        else:
            store.join()
        asyncio.get_running_loop().add_reader(store.fileno(), self._on_frames)
        self._watch_writes()
        return True

    def _disconnect(self, store: StoreClient) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(store.fileno())
        loop.remove_writer(store.fileno())
        store.close()
        self._store = None

    def _on_frames(self) -> None:
        for _ in range(_MOST):
            if (store := self._store) is None:
                return
            try:
                frame = store.receive()
            except BlockingIOError:
                return
            except (OSError, BadFrame) as error:
                log.warning("the descriptor store is lost: %s", error)
                frame = None
            if frame is None:
                self._disconnect(store)
                self._spawn(self._again())
                return
            self._take(frame)

    async def _again(self) -> None:
        """Connect to the store that replaces one that has ended."""
        if not self._leaving:
            log.warning("the descriptor store has ended; connections are kept by the next")
            await self.start()

    def _watch_writes(self) -> None:
        """Have messages sent later that the store does not read now."""
        if self._store is None or not self._store.is_behind:
            return
        asyncio.get_running_loop().add_writer(self._store.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        if self._store is None:
            return
        with contextlib.suppress(OSError):  # its end is read by `_on_frames`
            self._store.flush()
        if not self._store.is_behind:
            asyncio.get_running_loop().remove_writer(self._store.fileno())

    # ---------------------------------------------------------------------------------------------------- connections
    def _take(self, frame: Frame) -> None:
        if not stat.S_ISSOCK(os.fstat(frame.fds[0]).st_mode):
            close_all(frame.fds[:1])
            self._adopt(frame, None)
            return
        peer = socket.socket(fileno=frame.fds[0])
        peer.setblocking(False)
        if len(frame.fds) > 1:
            self._adopt(frame, peer)
            return
        try:
            memory = ConnectionMemory.create(
                kernel_counts.consumed(peer), kernel_counts.taken(peer)
            )
        except OSError as error:  # no memory, or no file may grow
            log.warning("a connection is served, and not kept: %s", error)
            self._drop(frame.id)
            self._spawn(self._open(self._make, peer))
            return
        if self._store is not None:
            self._store.keep(frame.id, memory.fd)
            self._watch_writes()
        self._hold(_Held(frame.id, memory, peer), adopted=False)

    def _adopt(self, frame: Frame, peer: socket.socket | None) -> None:
        """Serve a connection on with the memory that another gateway has left.

        peer: None for a session whose client is away.
        """
        memory = None
        try:
            memory = adopted(frame.fds[1], peer)
            if memory.is_away:
                self._adopt_session(_Held(frame.id, memory, None))
                if peer is not None:
                    peer.close()
            elif peer is not None:
                is_returned = frame.kind is Kind.RETURN
                self._hold(_Held(frame.id, memory, peer, is_returned=is_returned), adopted=True)
            else:
                raise BadMemory("its client is not away, and has no connection")
        except (OSError, BadMemory) as error:
            log.warning("a connection cannot be served: %s", error)
            if peer is not None:
                peer.close()
            if memory is not None:
                memory.close()
            else:
                close_all(frame.fds[1:])
            self._drop(frame.id)
            return
        self.adopted += 1

    def _adopt_session(self, held: _Held) -> None:
        """Go on with a session whose client is away. Raises BadMemory."""
        connection = self._connection(held, adopted=True)
        held.is_arriving = True
        self._arrivals.begin()
        connection.connection_made(AbsentTransport(connection))

    def _hold(self, held: _Held, *, adopted: bool) -> None:
        """Serve a kept connection. Raises BadMemory if what another gateway has left cannot be used."""
        connection = self._connection(held, adopted=adopted)
        assert held.peer is not None
        self._spawn(self._open(lambda: connection, held.peer, connection.forget))

    def _connection(self, held: _Held, *, adopted: bool) -> KeptConnection:
        """Return the connection of what is held from now on. Raises BadMemory as `_hold`."""
        connection = KeptConnection(
            held.memory,
            self._make,
            lambda: self._end(held),
            adopted=adopted,
            away=lambda: self._away(held),
            known=lambda: self._arrive(held),
            passed=lambda: self._pass(held),
        )
        self._held[held.id] = held
        return connection

    async def _open(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        peer: socket.socket,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(make, peer)
        except (OSError, RuntimeError) as error:  # uvloop's, if it cannot open a transport
            log.warning("a connection cannot be served: %s", error)
            forget()
            peer.close()

    def _away(self, held: _Held) -> None:
        """Have the store keep the memory of a session whose client has left, and no connection."""
        held.memory.set_away()
        del self._held[held.id]
        before, held.id, held.peer = held.id, secrets.randbits(64), None
        self._held[held.id] = held
        if self._store is not None:
            self._store.put(held.id, *held.fds)
        self._drop(before)

    def _arrive(self, held: _Held) -> None:
        if held.is_arriving:
            held.is_arriving = False
            self._arrivals.end()

    def _pass(self, held: _Held) -> bool:
        """Have the store give the connection to another gateway, unless all have passed it on."""
        if held.is_returned or held.peer is None or self._store is None:
            return False
        self._held.pop(held.id, None)
        self._store.pass_on(held.id)
        self._watch_writes()
        return True

    def _end(self, held: _Held) -> None:
        """Have the store drop what it holds."""
        self._arrive(held)
        self._held.pop(held.id, None)
        self._drop(held.id)

    def _drop(self, id_: int) -> None:
        if self._store is not None:
            self._store.drop(id_)
            self._watch_writes()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
