"""Start and stop fake engines as processes of this machine, for a planner."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from benchmarks.stack.stack import Stack, module_command


@dataclass(eq=False)
class _Engine:
    process: asyncio.subprocess.Process
    since: float
    until: float = math.inf


class Spawner:
    """Implement a planner's actuator with processes of this machine; stops the youngest first."""

    def __init__(self, stack: Stack, engine: Sequence[str]):
        self._stack, self._engine = stack, engine
        self._running: list[_Engine] = []
        self._all: list[_Engine] = []
        self._ending: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()
        self.most = 0

    async def count(self, name: str) -> int | None:
        return len(self._running)

    async def scale(self, name: str, count: int) -> None:
        async with self._lock:
            while len(self._running) < count:
                self._running.append(await self._start())
            while len(self._running) > count:
                self._ending.append(asyncio.create_task(self._end(self._running.pop())))
            self.most = max(self.most, count)

    async def close(self) -> None:
        """Do nothing: the planner closes its actuator, but the engines end with the stack."""

    async def stop(self) -> None:
        """Stop all engines."""
        await self.scale("decode", 0)
        await asyncio.gather(*self._ending)

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds of all engines between two times, from their start to their exit."""
        return sum(max(0.0, min(each.until, end) - max(each.since, begin)) for each in self._all)

    async def _start(self) -> _Engine:
        instance = f"decode-{len(self._all)}"
        argv = module_command("benchmarks.stack.fake_engine", instance, *self._engine)
        since = monotonic()
        with (self._stack.folder / f"{instance}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, env=self._stack.env, stdout=log, stderr=log
            )
        self._all.append(_Engine(process, since))
        return self._all[-1]

    async def _end(self, engine: _Engine) -> None:
        with contextlib.suppress(ProcessLookupError):
            engine.process.terminate()
        try:
            await asyncio.wait_for(engine.process.wait(), 40.0)
        except TimeoutError:
            engine.process.kill()
            await engine.process.wait()
        engine.until = monotonic()
