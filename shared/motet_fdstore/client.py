"""Talk to the descriptor store from a gateway, without ever waiting for it."""

from __future__ import annotations

import socket
from collections import deque
from pathlib import Path

from .frames import Frame, Kind, receive, send


class StoreClient:
    """Connect to the store at `path`. Raises OSError if none is there."""

    def __init__(self, path: Path):
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outbox: deque[Frame] = deque()
        try:
            self._peer.connect(str(path))
        except OSError:
            self._peer.close()
            raise
        self._peer.setblocking(False)

    def fileno(self) -> int:
        return self._peer.fileno()

    @property
    def is_behind(self) -> bool:
        """Return True if messages wait for the store to read; `flush` sends them."""
        return bool(self._outbox)

    def join(self) -> None:
        """Take connections from now on."""
        self._send(Frame(Kind.JOIN))

    def keep(self, id_: int, memory: int) -> None:
        """Have the store keep a duplicate of a connection's memory."""
        self._send(Frame(Kind.KEEP, id_, fds=(memory,)))

    def put(self, id_: int, socket_: int, memory: int) -> None:
        """Have a new store keep a connection that it does not know."""
        self._send(Frame(Kind.PUT, id_, fds=(socket_, memory)))

    def drop(self, id_: int) -> None:
        """Have the store close its duplicates: the connection has ended."""
        self._send(Frame(Kind.DROP, id_))

    def pass_on(self, id_: int) -> None:
        """Have the store give the connection to another gateway; to this one if all have passed it on."""
        self._send(Frame(Kind.PASS, id_))

    def leave(self) -> None:
        """Take no more connections."""
        self._send(Frame(Kind.LEAVE))

    def receive(self) -> Frame | None:
        """Return the next connection, or None if the store has ended.

        Raises BlockingIOError if there is none yet, BadFrame, and OSError.
        """
        return receive(self._peer)

    def flush(self) -> None:
        """Send what waits. Raises OSError if the store has ended."""
        while self._outbox:
            try:
                send(self._peer, self._outbox[0])
            except BlockingIOError:
                return
            self._outbox.popleft()

    def close(self) -> None:
        self._peer.close()

    def _send(self, frame: Frame) -> None:
        """Send a message. A store that has ended is noticed by `receive`."""
        self._outbox.append(frame)
        try:
            self.flush()
        except OSError:
            self._outbox.clear()
