"""Take over a session whose client is away: it has no connection, and waits for its client to come back."""

from __future__ import annotations

import asyncio
from typing import Any


class AbsentTransport(asyncio.Transport):
    """Stand in for the connection of a client that has left: what is written goes nowhere.

    The connection is lost as soon as the session has what was received over it.
    """

    def __init__(self, protocol: asyncio.BaseProtocol):
        super().__init__()
        self._protocol = protocol
        self._is_lost = False

    def close(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            gone = ConnectionResetError("its client is away")
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, gone)

    abort = close

    def write(self, data: Any) -> None:
        """Write nothing."""

    def is_closing(self) -> bool:
        return self._is_lost

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        """Do nothing: all that was received is in memory."""

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0


class Arrivals:
    """Count the sessions that were taken over and are not known here yet."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self) -> None:
        self._count += 1
        self._none.clear()

    def end(self) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def wait(self) -> None:
        """Wait until all are known, or have failed."""
        await self._none.wait()
