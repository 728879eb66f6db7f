"""Index which decode instance holds which prompt blocks, from published prefix cache updates."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from motet_shared.errors import MotetError
from motet_shared.messages import (
    PROTOCOL,
    CachedBlocks,
    CacheUpdate,
    ListBlocks,
    decode_cache_update,
)
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus
from motet_shared.wire.transport import Message

log = logging.getLogger(__name__)

ROLE = "decode"
READ_TIMEOUT_SECONDS = 10.0  # seconds for an answer
READ_INTERVAL_SECONDS = 1.0  # seconds between two requests for all blocks of an instance
MAX_LAGGING_TICKS = 3  # ticks for which the index may lag behind the news number of a heartbeat


@dataclass(slots=True, eq=False)
class _Cache:
    """Hold the known state of an instance: its blocks after all updates before `number`.

    task: reads all blocks.
    later: updates received meanwhile.
    """

    number: int = 0
    blocks: set[int] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    later: list[CacheUpdate] = field(default_factory=list)  # news received meanwhile
    lagging_ticks: int = 0
    wait: float = 0.0

    def take(self, news: CacheUpdate) -> bool:
        """Apply an update. Return False if earlier ones are missing."""
        if news.number > self.number:
            return False
        if news.number == self.number:
            self.blocks.update(news.stored)
            self.blocks.difference_update(news.dropped)
            self.number += 1
        return True


class PrefixIndex:
    """Track the blocks of all instances, which `held` looks up.

    While all blocks of an instance are being read, its cache counts as empty.
    """

    def __init__(self, bus: Bus):
        self._bus = bus
        self._caches: dict[str, _Cache] = {}
        self.counts: Counter[str] = Counter()
        bus.directory.on_gone.append(self._forget)
        bus.monitor.duties.append(self._tick)

    async def start(self) -> None:
        await self._bus.control.subscribe(subjects.CACHE_UPDATES, self.on_news)

    async def close(self) -> None:
        """Stop reading blocks."""
        tasks = [cache.task for cache in self._caches.values() if cache.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def held(self, instance: str, chain: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt this instance holds."""
        cache = self._caches.get(instance)
        if cache is None or cache.task is not None:
            return 0
        return next(
            (count for count, block in enumerate(chain) if block not in cache.blocks), len(chain)
        )

    def __len__(self) -> int:
        return sum(len(cache.blocks) for cache in self._caches.values())

    # -------------------------------------------------------------------------------------- updates
    def on_news(self, message: Message) -> None:
        try:
            news = decode_cache_update(message.data)
            is_from_sender = (
                message.subject == subjects.cache_updates(news.instance) and news.v == PROTOCOL
            )
        except ValueError:
            self.counts["malformed_cache_update"] += 1
            return
        if (
            not is_from_sender
        ):  # permissions bind the subject to a role: the content must agree with it
            self.counts["forged_cache_update"] += 1
            return
        cache = self._caches.setdefault(news.instance, _Cache())
        if cache.task is not None:
            cache.later.append(news)
        elif not cache.take(news):
            self._ask(news.instance, cache, news)

    async def _tick(self, elapsed: float) -> None:
        """Detect missing news by heartbeats: the last before a pause, or all before this start."""
        for beat in self._bus.directory.ready(ROLE):
            number = int(beat.load.get("cache_updates", 0))
            cache = self._caches.get(beat.instance)
            if cache is None:
                cache = self._caches[beat.instance] = _Cache()
            cache.wait = max(0.0, cache.wait - elapsed)
            cache.lagging_ticks = cache.lagging_ticks + 1 if number > cache.number else 0
            if cache.lagging_ticks >= MAX_LAGGING_TICKS and cache.task is None and not cache.wait:
                self._ask(beat.instance, cache)

    def _ask(self, instance: str, cache: _Cache, *later: CacheUpdate) -> None:
        self.counts["cache_dumps"] += 1
        cache.later = list(later)
        cache.task = asyncio.get_running_loop().create_task(
            self._read(instance, cache), name=f"cache of {instance}"
        )

    async def _read(self, instance: str, cache: _Cache) -> None:
        """Read all blocks that the instance holds, then apply the news received meanwhile."""
        blocks: set[int] = set()
        number = 0
        try:
            async with self._bus.open(
                ROLE, ListBlocks(), instance=instance, deadline=READ_TIMEOUT_SECONDS
            ) as stream:
                async for body in stream:
                    if isinstance(body, CachedBlocks):
                        number = body.number
                        blocks.update(body.blocks)
        except MotetError as error:
            log.info("no list of what %s holds: %s", instance, error.message)
        except Exception:
            log.exception("no list of what %s holds", instance)
        else:
            cache.number, cache.blocks = number, blocks
        cache.task, cache.lagging_ticks, cache.wait = None, 0, READ_INTERVAL_SECONDS
        for news in cache.later:
            cache.take(news)  # news still missing are detected by the next heartbeat
        cache.later = []

    def _forget(self, instance: str) -> None:
        cache = self._caches.pop(instance, None)
        if cache is not None and cache.task is not None:
            cache.task.cancel()
