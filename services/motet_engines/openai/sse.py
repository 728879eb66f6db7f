"""Split a response body into the data of its server-sent events."""

from __future__ import annotations

from motet_shared.errors import Unavailable

MAX_EVENT = 8 << 20  # bytes of an event that is not complete yet


class EventSplitter:
    """Feed bytes as they arrive; each call returns the data of the events that they complete.

    Comments and fields other than `data` are dropped. Raises Unavailable for an endless event.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT:
            raise Unavailable(f"the engine's server sends an event of more than {MAX_EVENT} bytes")
        found = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
