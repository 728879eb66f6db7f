"""Batch the frames of many streams into forward passes.

A stream has at most one frame in a pass, because its next frame needs the state that this one
leaves. While a pass is computed on its own thread, arriving frames collect for the next: there is
no timer, and passes grow with the load.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .model import Floats, Silero, StreamState


@dataclass(slots=True)
class PassCounters:
    """Count the passes of a process.

    passes: since the start.
    frames: in all passes.
    largest_pass: frames of the largest one.
    """

    passes: int = 0
    frames: int = 0
    largest_pass: int = 0


@dataclass(slots=True, eq=False)
class _PendingFrames:
    """Hold consecutive frames of one stream that wait for their passes.

    done: resolves with all probabilities.
    found: probabilities so far.
    """

    stream_state: StreamState
    frames: list[Floats]
    done: asyncio.Future[list[float]]
    found: list[float] = field(default_factory=list)


class Batcher:
    """Batch all calls of the network; no other code may call it.

    `run` must be running while `probabilities` is called.
    """

    def __init__(self, model: Silero, max_batch: int):
        self.counters = PassCounters()
        self._model = model
        self._max_batch = max_batch
        self._queue: deque[_PendingFrames] = deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="silero")

    async def probabilities(self, stream_state: StreamState, frames: list[Floats]) -> list[float]:
        """Return the speech probability of each frame, in order. One call per stream at a time."""
        if not frames:
            return []
        entry = _PendingFrames(stream_state, frames, asyncio.get_running_loop().create_future())
        self._queue.append(entry)
        self._wake.set()
        return await entry.done

    async def run(self) -> None:
        """Compute passes until cancelled.

        An exception of the network ends it, since the streams' states are no longer reliable.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if batch := self._next():
                await loop.run_in_executor(self._thread, self._pass, batch)
            self._deliver(batch)

    def _next(self) -> list[_PendingFrames]:
        """Return the streams that have waited longest, without those cancelled in the meantime."""
        batch: list[_PendingFrames] = []
        while self._queue and len(batch) < self._max_batch:
            entry = self._queue.popleft()
            if not entry.done.done():
                batch.append(entry)
        return batch

    def _pass(self, batch: list[_PendingFrames]) -> None:
        frames = [entry.frames[len(entry.found)] for entry in batch]
        probabilities = self._model.step(frames, [entry.stream_state for entry in batch])
        for entry, probability in zip(batch, probabilities, strict=True):
            entry.found.append(probability)

    def _deliver(self, batch: list[_PendingFrames]) -> None:
        if batch:
            self.counters.passes += 1
            self.counters.frames += len(batch)
            self.counters.largest_pass = max(self.counters.largest_pass, len(batch))
        for entry in batch:
            if entry.done.done():
                continue
            if len(entry.found) == len(entry.frames):
                entry.done.set_result(entry.found)
            else:
                self._queue.append(entry)
        if not self._queue:
            self._wake.clear()

    @property
    def waiting(self) -> int:
        """Return how many streams wait for a pass, without those in the running pass."""
        return sum(not entry.done.done() for entry in self._queue)

    def close(self) -> None:
        """End the thread of the network."""
        self._thread.shutdown(wait=False, cancel_futures=True)
