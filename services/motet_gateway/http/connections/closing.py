"""Abort closing connections whose clients do not read the last bytes."""

from __future__ import annotations

import asyncio


class ClosingTimer:
    """Abort a connection that takes too long to close."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since: float | None = None

    def check(self, transport: asyncio.Transport, now: float, limit: float) -> bool:
        """Return True if the transport is closing, and abort it if that takes too long.

        The limit is `limit` seconds since the first call that found it closing; `now` is in
        seconds.
        """
        if not transport.is_closing():
            return False
        if self._since is None:
            self._since = now
        elif now - self._since > limit:
            transport.abort()
        return True
