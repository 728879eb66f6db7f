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

from .model import Floats, Memory, Silero


@dataclass(slots=True)
class Counters:
    passes: int = 0
    frames: int = 0
    largest_pass: int = 0


@dataclass(slots=True, eq=False)
class _Turn:
    """Consecutive frames of one stream."""

    memory: Memory
    frames: list[Floats]
    done: asyncio.Future[list[float]]
    found: list[float] = field(default_factory=list)


class Batcher:
    """Batch all calls of the network; no other code may call it.

    `run` must be running while `probabilities` is called.
    """

    def __init__(self, model: Silero, max_batch: int):
        self.counters = Counters()
        self._model = model
        self._max_batch = max_batch
        self._turns: deque[_Turn] = deque()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="silero")

    async def probabilities(self, memory: Memory, frames: list[Floats]) -> list[float]:
        """Return the speech probability of each frame, in order. One call per stream at a time."""
        if not frames:
            return []
        turn = _Turn(memory, frames, asyncio.get_running_loop().create_future())
        self._turns.append(turn)
        self._wake.set()
        return await turn.done

    async def run(self) -> None:
        """Compute passes until cancelled.

        An exception of the network ends it, since the streams' states are no longer reliable.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            if turns := self._next():
                await loop.run_in_executor(self._thread, self._pass, turns)
            self._settle(turns)

    def _next(self) -> list[_Turn]:
        """Return the streams that have waited longest, without those cancelled in the meantime."""
        turns: list[_Turn] = []
        while self._turns and len(turns) < self._max_batch:
            turn = self._turns.popleft()
            if not turn.done.done():
                turns.append(turn)
        return turns

    def _pass(self, turns: list[_Turn]) -> None:
        frames = [turn.frames[len(turn.found)] for turn in turns]
        probabilities = self._model.step(frames, [turn.memory for turn in turns])
        for turn, probability in zip(turns, probabilities, strict=True):
            turn.found.append(probability)

    def _settle(self, turns: list[_Turn]) -> None:
        if turns:
            self.counters.passes += 1
            self.counters.frames += len(turns)
            self.counters.largest_pass = max(self.counters.largest_pass, len(turns))
        for turn in turns:
            if turn.done.done():
                continue
            if len(turn.found) == len(turn.frames):
                turn.done.set_result(turn.found)
            else:
                self._turns.append(turn)
        if not self._turns:
            self._wake.clear()

    @property
    def waiting(self) -> int:
        """Return how many streams wait for a pass, without those in the running pass."""
        return sum(not turn.done.done() for turn in self._turns)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
