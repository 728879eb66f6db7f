"""Report to routers what the prefix cache holds: changes ten times a second, everything on request.

Events are numbered. A router that misses one, or starts late, asks for all that is held as of some
number and continues with the events after it. Heartbeats carry the number of the next event, so the
loss of the last one is noticed too.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from motet_shared.errors import MotetError
from motet_shared.messages import PROTOCOL, CachedBlocks, CacheUpdate, encode
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

PIECE = 50_000  # blocks per message: half a megabyte


class CacheReporter:
    """Publish the changes of a prefix cache.

    changes: appended to on the engine's thread: (a block's name, whether it is held).
    """

    def __init__(self, bus: Bus, changes: deque[tuple[int, bool]]):
        self._bus = bus
        self._changes = changes
        self._held: set[int] = set()
        self.number = 0  # of the next event

    async def tick(self, _elapsed: float) -> None:
        """Publish what has changed."""
        stored, dropped = self._settle()
        for held, gone in [(piece, []) for piece in _pieces(stored)] + [
            ([], piece) for piece in _pieces(dropped)
        ]:
            news = CacheUpdate(PROTOCOL, self._bus.instance, self.number, held, gone)
            self.number += 1
            with suppress(MotetError):  # routers notice the gap in the numbers
                await self._bus.control.publish(
                    subjects.cache_updates(self._bus.instance), encode(news)
                )

    def _settle(self) -> tuple[list[int], list[int]]:
        """Return the blocks newly held and those no longer held; changes in between cancel out."""
        last: dict[int, bool] = {}
        while self._changes:
            block, held = self._changes.popleft()
            last[block] = held
        stored = [block for block, held in last.items() if held and block not in self._held]
        dropped = [block for block, held in last.items() if not held and block in self._held]
        self._held.update(stored)
        self._held.difference_update(dropped)
        return stored, dropped

    async def serve(self, call: Call) -> None:
        """Send all that is held, as of the events before `number`."""
        number, held = self.number, list(self._held)
        for piece in _pieces(held) or [[]]:
            await call.send(CachedBlocks(number, piece))
        call.finish("stop")


def _pieces(blocks: list[int]) -> list[list[int]]:
    return [blocks[start : start + PIECE] for start in range(0, len(blocks), PIECE)]
