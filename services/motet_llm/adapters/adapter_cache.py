"""Keep adapters in the slots of a worker's bank: load in the background, evict by last use.

A request holds its adapter from before it enters the engine until it has left it. A request whose
adapter is not resident waits while it is loaded on a separate thread; no step waits. Where all
slots are held, requests for other adapters queue for the next free slot; after they have waited a
second, requests for resident adapters queue behind them, so that slots become free.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from motet_shared.errors import DeadlineExceeded

from .bank import AdapterBank, ResidentAdapter

OVERTAKING_SECONDS = 1.0  # seconds for which requests of resident adapters may overtake
AfterStep = Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class _Resident:
    """Track the adapter of one slot.

    holders: number of requests that use it or wait for its loading.
    """

    slot: int
    loading: asyncio.Future[ResidentAdapter]
    holders: int = 0


class AdapterCache:
    """Hold adapters for requests.

    `after_step` calls a function once no step computes with requests that were cancelled before.
    """

    def __init__(self, bank: AdapterBank, after_step: AfterStep):
        self._bank = bank
        self._after_step = after_step
        self._thread = ThreadPoolExecutor(1, "motet-adapters")
        self._by_name: OrderedDict[str, _Resident] = OrderedDict()  # least recently used first
        self._free = list(range(bank.slots))
        self._num_slots = bank.slots
        self._leaving: set[_Resident] = set()  # those that are gone, while requests hold them
        self._queue = asyncio.Lock()
        self._freed = asyncio.Event()
        self._stalled_since: float | None = None  # when the first in the queue found no free slot
        self._loads = self._evictions = self._waiting = self._ending = 0
        self._seconds = 0.0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def refresh(self) -> None:
        """Use the slots that the bank has got since."""
        self._free += range(self._num_slots, self._bank.slots)
        self._num_slots = self._bank.slots
        self._freed.set()

    async def forget(self, name: str) -> None:
        """Let no request take an adapter any more; requests that hold it keep it in its slot."""
        resident = self._by_name.pop(name, None)
        if resident is None:
            return
        self._leaving.add(resident)
        with suppress(Exception):  # those that wait for it get the error
            await asyncio.shield(resident.loading)
        self._leave(resident)

    def _leave(self, resident: _Resident) -> None:
        """Free the slot of one that has gone, once it is loaded and no request holds it."""
        if resident in self._leaving and resident.loading.done() and not resident.holders:
            self._leaving.discard(resident)
            self._free.append(resident.slot)
            self._freed.set()

    def is_resident(self, name: str) -> bool:
        resident = self._by_name.get(name)
        return resident is not None and resident.loading.done()

    @property
    def load_seconds(self) -> float:
        """Return the average seconds to load an adapter; 0 while none was loaded."""
        return self._seconds / self._loads if self._loads else 0.0

    @asynccontextmanager
    async def holding(
        self, name: str, deadline: float | None = None
    ) -> AsyncIterator[ResidentAdapter]:
        """Hold an adapter in its slot within the block.

        `deadline` is on the clock of `time.monotonic()`. Raises BadRequest for an adapter that
        cannot be served, or DeadlineExceeded.
        """
        self._bank.folder(name)
        resident = await self._wait(name, deadline)
        try:
            yield resident.loading.result()
        finally:
            self._ending += 1
            self._after_step(lambda: self._end_use(resident))

    async def _wait(self, name: str, deadline: float | None) -> _Resident:
        self._waiting += 1
        try:
            async with asyncio.timeout(
                None if deadline is None else max(deadline - time.monotonic(), 0)
            ):
                return await self._acquire(name)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the deadline passed before adapter {name!r} was loaded"
            ) from None
        finally:
            self._waiting -= 1

    async def _acquire(self, name: str) -> _Resident:
        resident = self._by_name.get(name)
        if resident is None or self._is_queue_stalled():
            async with self._queue:
                resident = await self._wait_for_slot(name)
                resident.holders += 1
        else:
            resident.holders += 1
        self._by_name.move_to_end(name)
        try:
            await asyncio.shield(resident.loading)
        except BaseException:
            self._release(resident)
            raise
        return resident

    def _is_queue_stalled(self) -> bool:
        return (
            self._stalled_since is not None
            and time.monotonic() - self._stalled_since > OVERTAKING_SECONDS
        )

    async def _wait_for_slot(self, name: str) -> _Resident:
        try:
            while (resident := self._by_name.get(name)) is None:
                slot = self._take_slot()
                if slot is not None:
                    return self._load(name, slot)
                self._stalled_since = self._stalled_since or time.monotonic()
                self._freed.clear()
                await self._freed.wait()
            return resident
        finally:
            self._stalled_since = None

    def _take_slot(self) -> int | None:
        """Return a free slot, or that of the adapter unused for longest; None if all are in use.

        A slot whose adapter is being loaded is in use, even if the requests for it have gone.
        """
        if self._free:
            return self._free.pop()
        residents = self._by_name.items()
        unused = next(
            (name for name, one in residents if not one.holders and one.loading.done()), None
        )
        if unused is None:
            return None
        self._evictions += 1
        return self._by_name.pop(unused).slot

    def _load(self, name: str, slot: int) -> _Resident:
        began = time.monotonic()
        loading = asyncio.get_running_loop().run_in_executor(
            self._thread, self._bank.load, name, slot
        )
        resident = self._by_name[name] = _Resident(slot, loading)
        loading.add_done_callback(
            lambda done: self._loaded(name, resident, time.monotonic() - began)
        )
        return resident

    def _loaded(self, name: str, resident: _Resident, seconds: float) -> None:
        """Record a load that has ended; free the slot of one that failed.

        A failure is not cached: the next request for the adapter tries again.
        """
        if not resident.loading.cancelled() and resident.loading.exception() is None:
            self._loads += 1
            self._seconds += seconds
        elif self._by_name.get(name) is resident:  # else its slot was taken, or `forget` frees it
            del self._by_name[name]
            self._free.append(resident.slot)
        self._freed.set()  # also where all requests for it have gone: its slot may be taken now

    def _end_use(self, resident: _Resident) -> None:
        self._ending -= 1
        self._release(resident)

    def _release(self, resident: _Resident) -> None:
        resident.holders -= 1
        if not resident.holders:
            self._leave(resident)
            self._freed.set()

    def stats(self) -> dict[str, float]:
        """Return counts of slots, adapters, waiting requests and loads, and bytes.

        Loads, their seconds and evictions are since the start.
        """
        return {
            "adapter_slots": self._bank.slots,
            "adapters_resident": sum(one.loading.done() for one in self._by_name.values()),
            "adapters_refused": len(self._bank.refused),
            "adapters_waiting": self._waiting,
            "adapter_loads": self._loads,
            "adapter_load_seconds": self._seconds,
            "adapter_evictions": self._evictions,
            "adapter_bytes": self._bank.nbytes,
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each slot is free or taken once, and held by leaving requests.

        Call it while the actor is idle.
        """
        taken = [*self._by_name.values(), *self._leaving]
        slots = sorted([*self._free, *(one.slot for one in taken)])
        held = sum(one.holders for one in taken)
        if slots != list(range(self._bank.slots)) or held != self._ending:
            raise RuntimeError(
                f"adapters: slots {slots} of {self._bank.slots}, held {held} times though nothing runs"
            )
