"""Take connections from the descriptor store, and give it what it has to keep."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from motet_fdstore.client import StoreClient
from motet_fdstore.frames import BadFrame, Frame, close_all

from . import kernel_counts
from .memory import BadMemory, ConnectionMemory
from .transport import KeptConnection

log = logging.getLogger(__name__)

_RETRY = 0.1  # seconds between two attempts to reach the store
_MOST = 64  # connections taken before the loop does something else


class Intake:
    """Serve the connections of the store at `path`, each with a protocol of `make`."""

    def __init__(self, path: Path, make: Callable[[], asyncio.Protocol]):
        self._path, self._make = path, make
        self._store: StoreClient | None = None
        self._held: dict[int, tuple[KeptConnection, socket.socket]] = {}
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
        for id_, (connection, peer) in list(self._held.items()):
            store.put(id_, peer.fileno(), connection.memory.fd)
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
            self._end(frame.id)
            self._spawn(self._open(self._make, peer))
            return
        if self._store is not None:
            self._store.keep(frame.id, memory.fd)
            self._watch_writes()
        self._hold(frame.id, memory, peer, adopted=False)

    def _adopt(self, frame: Frame, peer: socket.socket) -> None:
        """Serve a connection on with the memory that another gateway has left."""
        memory = None
        try:
            consumed, taken = kernel_counts.consumed(peer), kernel_counts.taken(peer)
            memory = ConnectionMemory.adopt(frame.fds[1], consumed, taken)
            self._hold(frame.id, memory, peer, adopted=True)
        except (OSError, BadMemory) as error:
            log.warning("a connection cannot be served: %s", error)
            peer.close()
            if memory is not None:
                memory.close()
            else:
                close_all(frame.fds[1:])
            self._end(frame.id)
            return
        self.adopted += 1

    def _hold(
        self, id_: int, memory: ConnectionMemory, peer: socket.socket, *, adopted: bool
    ) -> None:
        """Serve a kept connection. Raises BadMemory if what another gateway has left cannot be used."""
        connection = KeptConnection(memory, self._make, lambda: self._end(id_), adopted=adopted)
        self._held[id_] = (connection, peer)
        self._spawn(self._open(lambda: connection, peer, connection.forget))

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

    def _end(self, id_: int) -> None:
        """Have the store drop a connection."""
        self._held.pop(id_, None)
        if self._store is not None:
            self._store.drop(id_)
            self._watch_writes()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
