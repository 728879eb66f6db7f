"""Two processes of each service that a feature needs, started when the first test needs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chaos.moves.features import BEGIN, FEATURES, MIDDLE, Feature
from chaos.moves.models import Argv, Models
from chaos.processes import NATS, Member, Processes, processes
from e2e.engines.peer import integrities
from motet_shared.testing import free_port

T = TypeVar("T")
TWO = 2  # of each
TRIES = 8  # a strike may come when the request is over: it is then tried again, earlier
_EARLIER = 0.7  # share of the progress of the try before
_RESTS_WITHIN = 20.0  # seconds


@dataclass(frozen=True)
class Undisturbed:
    """Hold what a feature returns when nothing happens, and the progress that it reports at most."""

    result: Any
    progress: int


class TooLate(Exception):
    """The request was over before it could be struck."""


@dataclass
class World:
    """Hold the processes, the gateway's address, and what features return undisturbed."""

    processes: Processes
    url: str
    models: Models
    started: set[str] = field(default_factory=set)
    known: dict[str, Undisturbed] = field(default_factory=dict)

    async def need(self, feature: Feature) -> None:
        """Start what is not there yet, and wait until all are ready."""
        for model in feature.models:
            if model not in self.started:
                self.started.add(model)
                commands = await asyncio.to_thread(self.models.processes, model)
                for role, argv in commands * TWO:
                    await self.start(role, argv)
        await self.processes.all_ready()

    async def start(self, role: str, argv: Argv) -> None:
        await self.processes.add(f"{role}-{len(self.processes.members)}", role, argv)

    async def undisturbed(self, name: str) -> Undisturbed:
        """Return what a feature returns, twice the same: else nothing could be compared."""
        await self.need(FEATURES[name])
        if name not in self.known:
            results, most = [], 0
            for _ in range(2):
                seen: list[int] = []
                results.append(await FEATURES[name].ask(self.url, seen.append))
                most = max(seen)
            assert results[0] == results[1], f"{name}: two undisturbed runs differ"
            assert results[0], f"{name}: nothing was returned"
            self.known[name] = Undisturbed(results[0], most)
        return self.known[name]

    async def struck(self, name: str, phase: str, victim: str) -> Any:
        """Return what a feature returns whose process, or NATS, is killed in a phase."""
        role = FEATURES[name].roles[0] if victim == NATS else victim

        async def strike(at_work: Awaitable[Member]) -> None:
            member = await at_work
            await self.processes.kill(NATS if victim == NATS else member.name)

        async def attempt(earlier: float) -> Any:
            async with self._asking(name, phase, role, earlier) as (asking, at_work):
                await _before_its_end(asking, strike(at_work))
                return await asking

        return await self._in_time(
            attempt, f"{name} was over before {victim} could be struck in its phase {phase!r}"
        )

    async def left(self, name: str, phase: str) -> None:
        """Ask for a feature and leave in a phase."""
        role = FEATURES[name].roles[0]

        async def attempt(earlier: float) -> None:
            async with self._asking(name, phase, role, earlier) as (asking, at_work):
                await _before_its_end(asking, at_work)

        await self._in_time(
            attempt, f"{name} was over before its client could leave in its phase {phase!r}"
        )

    async def _in_time(self, attempt: Callable[[float], Awaitable[T]], too_late: str) -> T:
        """Return what an attempt does, which is tried again, earlier, while it comes too late."""
        for number in range(TRIES):
            try:
                return await attempt(_EARLIER**number)
            except TooLate:
                await self.processes.all_ready()
        raise TooLate(too_late)

    @asynccontextmanager
    async def _asking(
        self, name: str, phase: str, role: str, earlier: float
    ) -> AsyncIterator[tuple[asyncio.Task[Any], Awaitable[Member]]]:
        """Ask for a feature; yield the task, which ends with the context, and what waits for its phase.

        That is the process of `role` which is at work then.
        """
        reached, at = asyncio.Event(), self.threshold(name, phase) * earlier

        def told(progress: int) -> None:
            if progress >= at:
                reached.set()

        async def serving() -> Member:
            await reached.wait()
            return await self.processes.serving(role)

        opening = self.processes.opening(role) if phase == BEGIN else nullcontext()
        async with opening as opened:
            asking = asyncio.create_task(FEATURES[name].ask(self.url, told))
            at_work = opened or asyncio.create_task(serving())
            try:
                yield asking, at_work
            finally:
                for task in (asking, at_work):
                    task.cancel()
                await asyncio.gather(asking, at_work, return_exceptions=True)

    def threshold(self, name: str, phase: str) -> float:
        """Return the progress at which a phase begins."""
        feature, most = FEATURES[name], self.known[name].progress
        shares = {BEGIN: 0.0, MIDDLE: feature.middle}
        return most * shares.get(phase, feature.end)

    async def rest(self) -> None:
        """Wait until all are ready and hold nothing of what is over; raises what is wrong with them."""
        await self.processes.all_ready()
        give_up = time.monotonic() + _RESTS_WITHIN
        while found := await self._complaints():
            assert time.monotonic() < give_up, found
        died = [member.name for member in self.processes.members if member.died]
        assert not died, f"ended by themselves: {died}"

    async def _complaints(self) -> list[str]:
        nats = self.processes.nats
        said = await integrities(nats.url, nats.passwords, 0.5)
        return [f"{instance}: {word}" for instance, word in said.items() if word != "ok"]


async def _before_its_end(asking: asyncio.Task[Any], doing: Awaitable[Any]) -> None:
    """Wait for `doing`. Raises TooLate, or the error of `asking`, if `asking` has ended before."""
    waiting = asyncio.ensure_future(doing)
    try:
        await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await asking  # its error, if it has one
            raise TooLate
        await waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    """Run a gateway in front of services that start as they are needed."""
    models = await asyncio.to_thread(Models, folder)
    async with processes() as running:
        port = free_port()
        made = World(running, f"http://127.0.0.1:{port}", models)
        await made.start(
            "gateway",
            ("motet_gateway", "--port", str(port), "--patience", "30", "--session-keep", "5"),
        )
        for _ in range(TWO):
            await made.start("tokenizer", models.tokenizer())
        supervisor = asyncio.create_task(running.supervise())
        try:
            yield made
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
