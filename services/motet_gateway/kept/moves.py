"""Take a session along from the memory of one connection to that of another, to which its client has moved.

The new memory gets the journal, and the messages that the client had sent over earlier connections.
A last record says that all of it is there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from websockets.frames import Opcode, apply_mask

_HEAD_END = b"\r\n\r\n"
_PLACE = struct.Struct("<QQ")
_TEXT, _BINARY = b"t", b"b"


class Place(NamedTuple):
    """Where a client goes on that has moved.

    sent: events before the next one that it gets. numbered: events that have a number.
    """

    sent: int = 0
    numbered: int = 0

    def encode(self) -> bytes:
        return _PLACE.pack(self.sent, self.numbered)

    @classmethod
    def decode(cls, data: bytes) -> Place:
        return cls(*_PLACE.unpack(data))


class Message(NamedTuple):
    """A message of the client; `text` is None for a binary one."""

    text: str | None

    def encode(self) -> bytes:
        return _BINARY if self.text is None else _TEXT + self.text.encode()

    @classmethod
    def decode(cls, data: bytes) -> Message:
        return cls(data[1:].decode() if data[:1] == _TEXT else None)


def upgrade_end(received: bytes) -> int:
    """Return the bytes of the request that opened a WebSocket, before its frames."""
    return received.index(_HEAD_END) + len(_HEAD_END)


def messages(received: bytes) -> Iterator[Message]:
    """Yield the messages of a client from the bytes of its connection."""
    view, at = memoryview(received), upgrade_end(received)
    parts: list[bytes] = []
    is_text = True
    while (frame := _frame(view, at)) is not None:
        opcode, is_last, begin, at = frame
        if opcode >= Opcode.CLOSE:
            continue
        if opcode != Opcode.CONT:
            is_text = opcode == Opcode.TEXT
        parts.append(apply_mask(bytes(view[begin:at]), bytes(view[begin - 4 : begin])))
        if is_last:
            data = b"".join(parts)
            parts.clear()
            yield Message(data.decode() if is_text else None)


def without_messages(received: bytes, count: int) -> bytes:
    """Return the upgrade, and the bytes of a connection behind its first `count` messages."""
    view, head = memoryview(received), upgrade_end(received)
    at = head
    while count and (frame := _frame(view, at)) is not None:
        opcode, is_last, _, at = frame
        count -= is_last and opcode < Opcode.CLOSE
    return received[:head] + received[at:]


def is_whole(received: bytes) -> bool:
    """Return True if the bytes of a connection end with a whole frame, or with the upgrade."""
    view, at = memoryview(received), upgrade_end(received)
    while (frame := _frame(view, at)) is not None:
        at = frame[-1]
    return at == len(received)


def _frame(view: memoryview, at: int) -> tuple[int, bool, int, int] | None:
    """Return opcode, whether it is the last of its message, begin and end of the payload; None: it is cut."""
    begin = at + 2
    if len(view) < begin:
        return None
    size, more = view[at + 1] & 0x7F, 0
    if size > 125:
        more = 2 if size == 126 else 8
        size = int.from_bytes(view[begin : begin + more])
    begin += more + 4
    if len(view) < begin + size:
        return None
    return view[at] & 0x0F, bool(view[at] & 0x80), begin, begin + size
