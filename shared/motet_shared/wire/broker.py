"""Distinguish an unresponsive NATS broker from a dead peer.

A broker that hangs, is paused or restarts silences every peer at once. While it does not answer
this process either, and until the peers have had time to reconnect, a peer's silence does not count
against it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from .transport import Transport

NOTICED = 0.3  # seconds without an echo after which peers may have lost connections or messages
SETTLE = 1.5  # seconds after an outage in which peers reconnect and catch up
HANGS = 5.0  # seconds without an echo after which peers may give up their connections


class Broker:
    """Probe the broker over each connection of a process, with one echo in flight per connection.

    `tick` sends the next echoes. `counted` is the time in seconds that counts against silent peers:
    it stands still during an outage and for `SETTLE` seconds after one. A peer without a subscription
    is another matter: late echoes do not explain it, only connections that were lost do.
    """

    def __init__(self, transports: Sequence[Transport]):
        self._transports = transports
        self._echoes: dict[int, asyncio.Task[None]] = {}  # by the index of the connection
        self._settling = 0.0  # seconds left until silence counts against peers again
        self._connected_for = SETTLE  # seconds since connections may have been lost
        self.silent = 0.0  # seconds since the last echo, in ticks of the monitor
        self.counted = 0.0

    @property
    def answers(self) -> bool:
        """Return True if the last echo came within a tick."""
        return not self.silent

    @property
    def settled(self) -> bool:
        """Return True if an unreachable peer may be considered dead."""
        return not self.silent and not self._settling

    @property
    def peers_are_back(self) -> bool:
        """Return True if a peer without a subscription may be considered dead."""
        return self._connected_for >= SETTLE - 0.01

    def tick(self, elapsed: float) -> float:
        """Advance time by `elapsed` seconds; return the part that counts against silent peers."""
        self._settling = max(0.0, self._settling - elapsed)
        self._connected_for += elapsed
        if all([self._echoed(place) for place in range(len(self._transports))]):
            self.silent = 0.0
        else:
            self.silent += elapsed
            if self.silent >= NOTICED - 0.01 or not self._connected:
                self._settling = SETTLE
            if self.silent >= HANGS or not self._connected:
                self._connected_for = 0.0
        if not self.settled:
            return 0.0
        self.counted += elapsed
        return elapsed

    @property
    def _connected(self) -> bool:
        return all(transport.connected for transport in self._transports)

    def _echoed(self, place: int) -> bool:
        """Return True if the previous echo has been answered; send the next one."""
        transport, echo = self._transports[place], self._echoes.get(place)
        if not transport.connected:
            if echo is not None:  # its answer was lost with the connection
                echo.cancel()
            self._echoes.pop(place, None)
            return False
        if echo is not None and not echo.done():
            return False
        self._echoes[place] = asyncio.get_running_loop().create_task(transport.ping())
        if echo is not None and (echo.cancelled() or echo.exception() is not None):
            self._settling, self._connected_for = SETTLE, 0.0  # it was lost, and is there again
            return False
        return True

    async def close(self) -> None:
        """Cancel the pending echoes."""
        echoes = list(self._echoes.values())
        for echo in echoes:
            echo.cancel()
        await asyncio.gather(*echoes, return_exceptions=True)
