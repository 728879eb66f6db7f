"""Exchange messages between the leader of a group and one of its ranks, over a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")


class Link(Generic[Received]):
    """Send messages to the other end, and receive its messages, of the type `kind`.

    Any thread may send; one receives.
    """

    def __init__(self, descriptor: int, kind: Any):
        self._connection = Connection(descriptor)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Raises OSError if the other end is gone, or reads nothing in time."""
        with self._sending:
            try:
                self._connection.send_bytes(self._encoder.encode(message))
            except BlockingIOError as error:
                raise TimeoutError("the other end has read nothing in time") from error

    def receive(self) -> Received:
        """Wait for a message and return it. Raises EOFError once the other end is gone."""
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from error

    def send_descriptor(self, descriptor: int) -> None:
        """Send a descriptor after the messages so far. Raises OSError as `send` does."""
        with self._sending, socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            try:
                socket.send_fds(end, [b"d"], [descriptor])
            except BlockingIOError as error:
                raise TimeoutError("the other end has read nothing in time") from error

    def receive_descriptor(self) -> int:
        """Wait for a descriptor that follows the last message. Raises EOFError as `receive` does."""
        try:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not descriptors:
            raise EOFError("no descriptor has come")
        return descriptors[0]

    def limit(self, seconds: float) -> None:
        """Have `send` raise OSError if the other end takes nothing for so long."""
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def shutdown(self) -> None:
        """End the link for both ends; a thread that receives on it gets EOFError."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the descriptor; no thread may use the link."""
        self._connection.close()


def pair() -> tuple[int, int]:
    """Return the descriptors of two connected ends."""
    one, other = socket.socketpair()
    return one.detach(), other.detach()
