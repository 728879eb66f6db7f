"""Read from the kernel how many bytes of a TCP connection it has taken, and how many were read."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios

_INFO_BYTES = 136
_BYTES_ACKED = struct.Struct("<Q")  # at 120 in struct tcp_info; bytes_received follows it
_ACKED_AT, _RECEIVED_AT = 120, 128
_NO_FIN = (1, 4, 5)  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2: the peer has not closed its side
_CLOSED = 7
_TRIES = 100


def taken(peer: socket.socket) -> int:
    """Return the bytes that the kernel has accepted for sending since the connection began.

    They are those acknowledged and those still queued. An acknowledgement may come between the two
    system calls, so the first is repeated. Raises OSError.
    """
    for _ in range(_TRIES):
        before = _count(peer, _ACKED_AT)
        queued = _ioctl(peer, termios.TIOCOUTQ)
        if _count(peer, _ACKED_AT) == before:
            break
    return before + queued


def consumed(peer: socket.socket) -> int:
    """Return the bytes that were read from the connection since it began. Raises OSError.

    A FIN of the peer counts as a byte received.
    """
    for _ in range(_TRIES):
        before, fin = _count(peer, _RECEIVED_AT), _has_fin(peer)
        unread = _ioctl(peer, termios.FIONREAD)
        if (_count(peer, _RECEIVED_AT), _has_fin(peer)) == (before, fin):
            break
    return before - unread - fin


def is_over(peer: socket.socket) -> bool:
    """Return True if the peer has closed its side. Raises OSError."""
    return _has_fin(peer)


def was_reset(peer: socket.socket) -> bool:
    """Return True if the connection is closed, mostly by a reset: `consumed` is then one byte less than what was read.

    Raises OSError.
    """
    return _info(peer)[0] == _CLOSED


def _info(peer: socket.socket) -> bytes:
    return peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)


def _count(peer: socket.socket, at: int) -> int:
    count: int = _BYTES_ACKED.unpack_from(_info(peer), at)[0]
    return count


def _has_fin(peer: socket.socket) -> bool:
    return _info(peer)[0] not in _NO_FIN


def _ioctl(peer: socket.socket, request: int) -> int:
    number = array.array("i", [0])
    fcntl.ioctl(peer.fileno(), request, number)
    return number[0]
