"""Define the limits of connections, and the state that all connections of a server share."""

from __future__ import annotations

from dataclasses import dataclass

from uvicorn.server import ServerState

from .counts import ConnectionCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Hold the limits of a connection in bytes and seconds; the defaults are those of the gateway's settings."""

    head_bytes: int = 64 * 2**10  # request line and header fields
    header_fields: int = 100
    head_seconds: float = 10.0  # from the first byte of a head to its last
    idle_seconds: float = 75.0  # without a request: on a new connection or between two requests
    body_seconds: float = 20.0  # for a body, plus received bytes / `body_rate`
    body_rate: float = 4096.0  # bytes per second

    @property
    def shortest(self) -> float:
        """Return the shortest of the time limits in seconds."""
        return min(self.head_seconds, self.idle_seconds, self.body_seconds)


class BoundedState(ServerState):
    """Hold the state of a server whose connections are bounded."""

    def __init__(self, bounds: Bounds | None = None, counts: ConnectionCounts | None = None):
        super().__init__()
        self.bounds = bounds or Bounds()
        self.counts = counts or ConnectionCounts()
