"""Number and render the server-sent events of one response."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class Events:
    """Collect the rendered events of a response, numbered from 0, until they are taken."""

    def __init__(self) -> None:
        self.count = 0
        self._rendered: list[tuple[int, bytes]] = []

    def add(self, kind: str, **fields: Any) -> None:
        data = _encode({"type": kind, "sequence_number": self.count, **fields})
        self._append(kind.encode(), data)

    def _append(self, kind: bytes, data: bytes) -> None:
        self._rendered.append((self.count, b"event: %b\ndata: %b\n\n" % (kind, data)))
        self.count += 1

    def take(self, after: int = -1) -> bytes:
        """Return what was added since the last call, without the events up to number `after`."""
        taken = b"".join([data for number, data in self._rendered if number > after])
        self._rendered.clear()
        return taken

    def deltas(self, kind: str, **fields: Any) -> Deltas:
        """Return a renderer of events that differ in number and text alone."""
        return Deltas(self, kind, fields)


class Deltas:
    """Render the deltas of one text: the hot path, once per step of the model."""

    def __init__(self, events: Events, kind: str, fields: dict[str, Any]):
        self._events, self._kind = events, kind.encode()
        head = _encode({"type": kind, **fields})[:-1].replace(b"%", b"%%")
        self._before = head + b',"sequence_number":%d,"delta":'

    def add(self, text: str) -> None:
        events = self._events
        events._append(self._kind, self._before % events.count + _encode(text) + b"}")
