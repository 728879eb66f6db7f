"""Define the messages between the descriptor store and its gateways.

Each is one packet of 16 bytes on a Unix socket of type SOCK_SEQPACKET, with at most two descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

VERSION = 1
MAX_FDS = 2
_FRAME = struct.Struct("<4sBBHQ")  # magic, version, kind, deaths, id of the connection
_MAGIC = b"MtFd"


class Kind(IntEnum):
    """Name the messages, with their sender and their descriptors."""

    JOIN = 1  # gateway: it takes connections from now on
    GIVE = 2  # store: a connection to serve; its socket, and its memory if it was served before
    KEEP = 3  # gateway: the memory of a connection that it was given
    PUT = 4  # gateway: socket and memory of a connection that a new store does not have yet
    DROP = 5  # gateway: the connection has ended
    LEAVE = 6  # gateway: it takes no more connections
    PASS = 7  # gateway: another one may have the session that the client asks for
    RETURN = 8  # store: a connection that all gateways have passed on; its socket and memory


_COUNTS: dict[int, tuple[int, ...]] = {  # numbers of descriptors that a message may have
    Kind.JOIN: (0,),
    Kind.GIVE: (1, 2),
    Kind.KEEP: (1,),
    Kind.PUT: (2,),
    Kind.DROP: (0,),
    Kind.LEAVE: (0,),
    Kind.PASS: (0,),
    Kind.RETURN: (2,),
}


class BadFrame(Exception):
    """Signal a packet that is no message of this version."""


class UnknownKind(BadFrame):
    """Signal a message of a kind that a later release has."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `deaths`: gateways that have died lately while they served the connection."""

    kind: Kind
    id: int = 0
    deaths: int = 0
    fds: tuple[int, ...] = ()


def send(peer: socket.socket, frame: Frame) -> None:
    """Send a message. Raises OSError; BlockingIOError if the peer does not read."""
    data = _FRAME.pack(_MAGIC, VERSION, frame.kind, frame.deaths, frame.id)
    if frame.fds:
        socket.send_fds(peer, [data], frame.fds)
    else:
        peer.send(data)


def receive(peer: socket.socket) -> Frame | None:
    """Return the next message, whose descriptors the caller owns, or None at the end.

    Raises BadFrame for another packet, whose descriptors are closed, and OSError.
    """
    data, fds, flags, _ = socket.recv_fds(peer, _FRAME.size + 1, MAX_FDS)
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        if not data:
            close_all(fds)
            return None
        return _parsed(data, tuple(fds), flags)
    except BadFrame:
        close_all(fds)
        raise


def _parsed(data: bytes, fds: tuple[int, ...], flags: int) -> Frame:
    if len(data) != _FRAME.size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise BadFrame(f"a packet of {len(data)} bytes and {len(fds)} descriptors")
    magic, version, kind, deaths, id_ = _FRAME.unpack(data)
    if magic != _MAGIC or version != VERSION:
        raise BadFrame(f"version {version}; this is version {VERSION}")
    if kind not in _COUNTS:
        raise UnknownKind(f"kind {kind}")
    if len(fds) not in _COUNTS[kind]:
        raise BadFrame(f"kind {kind} with {len(fds)} descriptors")
    return Frame(Kind(kind), id_, deaths, fds)


def close_all(fds: tuple[int, ...] | list[int]) -> None:
    """Close descriptors; those that are closed already are ignored."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
