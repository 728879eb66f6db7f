"""Generate load: send requests when they are due, or with fixed concurrency, and record them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from motet_cli.bench.request import Request
from motet_cli.bench.results.record import Record

_TICK = 0.02  # seconds between two measurements of the event loop's lag

Send = Callable[[Request, Record, Callable[[], float]], Awaitable[None]]


@dataclass
class Measured:
    """Hold the records of a run.

    seconds: from the first request to the end of the last one, or to the interruption.
    lags: delay of the client's event loop in seconds, at each measurement.
    cpu_seconds: CPU time of this process during the run.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    lags: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    interrupted: bool = False


class LoadGenerator:
    """Run a workload once.

    `stop` ends it early: requests in flight are cancelled and recorded as "interrupted".
    """

    def __init__(
        self, send: Send, *, concurrency: int | None = None, duration: float | None = None
    ):
        """Prepare a run.

        concurrency: requests in flight (a closed loop); None: each is sent when it is due.
        duration: seconds in which requests are sent; those in flight at its end are awaited.
        """
        self.measured = Measured()
        self.in_flight = 0
        self._send = send
        self._concurrency = concurrency
        self._duration = duration
        self._began = 0.0
        self._stop = asyncio.Event()

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.perf_counter() - self._began

    def stop(self) -> None:
        self._stop.set()

    async def run(self, requests: Iterator[Request]) -> Measured:
        """Send the requests and return their records once all have ended, or after `stop`."""
        measured = self.measured
        self._began, cpu = time.perf_counter(), time.process_time()
        work = asyncio.create_task(
            self._closed(requests) if self._concurrency else self._open(requests)
        )
        watch, stop = asyncio.create_task(self._watch()), asyncio.create_task(self._stop.wait())
        with _no_collection():
            try:
                await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
                measured.interrupted = not work.done()
            finally:
                for task in (work, watch, stop):
                    task.cancel()
                results = await asyncio.gather(work, watch, stop, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        measured.cpu_seconds = time.process_time() - cpu
        measured.seconds = (
            self.now()
            if measured.interrupted
            else max((r.ended for r in measured.records), default=0.0)
        )
        measured.records.sort(key=lambda record: record.number)
        return measured

    async def _open(self, requests: Iterator[Request]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                if self._duration is not None and request.arrival >= self._duration:
                    break
                while (wait := request.arrival - self.now()) > 0:  # noqa: ASYNC110 - a timer may be early
                    await asyncio.sleep(wait)
                group.create_task(self._one(number, request, request.arrival))

    async def _closed(self, requests: Iterator[Request]) -> None:
        numbered = enumerate(requests)

        async def worker() -> None:
            for number, request in numbered:
                await self._one(number, request, self.now())
                if self._duration is not None and self.now() >= self._duration:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(self._concurrency or 1):
                group.create_task(worker())

    async def _one(self, number: int, request: Request, due: float) -> None:
        record = Record(number, due, request.max_tokens)
        self.measured.records.append(record)
        self.in_flight += 1
        try:
            await self._send(request, record, self.now)
        finally:
            self.in_flight -= 1

    async def _watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_TICK)
            self.measured.lags.append(max(0.0, time.perf_counter() - before - _TICK))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, whose pauses would count as the server's time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
