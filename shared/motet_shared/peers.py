"""The passage of time for one process: probes of its peers, beats, resends, deadlines, heartbeats.

Every 100 ms each peer that this process has streams with is asked for a sign of life, with one request per instance
however many streams there are. A dead process bounces the probe with no-responders within a millisecond; one that
hangs is noticed by its missing beats (a worker) or unanswered probes (a caller).

Silence is counted in our own ticks, and a late tick counts no more than its period: when this machine is starved,
our clock is starved with it, and no peer is called dead for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from . import subjects
from .call import Calls
from .clock import Clock
from .errors import MotetError
from .messages import PROTOCOL, Controls, encode
from .stream import Caller
from .transport import NoResponders, Transport

log = logging.getLogger(__name__)

PERIOD = 0.1
PROBE_TIMEOUT = 1.0
CALLER_SILENCE = 5.0  # seconds after which a caller that answers no probe is given up


class Monitor:
    """Runs every periodic duty of a process in one task."""

    def __init__(self, caller: Caller, calls: Calls, control: Transport, clock: Clock):
        self._caller = caller
        self._calls = calls
        self._control = control
        self._clock = clock
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}  # beside a probe that is not answered yet
        self._unanswered: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._probe = encode(Controls(PROTOCOL, caller.instance, []))
        self.duties: list[Callable[[float], Awaitable[None]]] = []
        self.lag = 0.0  # how late the last tick was, seconds
        self.late = 0.0  # how late all ticks were together, seconds

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="monitor")

    async def close(self) -> None:
        tasks = [*self._probing.values(), *self._looking.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            before = self._clock.now()
            await self._clock.sleep(PERIOD)
            self.lag = max(0.0, self._clock.now() - before - PERIOD)
            self.late += self.lag
            try:
                await self.tick()
            except Exception:
                log.exception("a periodic duty failed")

    async def tick(self) -> None:
        connected = self._control.connected
        self._calls.tick(PERIOD)
        # While NATS itself is away nobody can be heard; that says nothing about them.
        await self._caller.tick(PERIOD if connected else 0.0)
        if connected:
            for peer in self._calls.callers() | self._caller.by_peer.keys():
                if peer not in self._probing:
                    self._probe_with(self._probing, peer, self._ask)
                elif peer not in self._looking:
                    self._probe_with(self._looking, peer, self._look)
        for duty in self.duties:
            try:
                await duty(PERIOD)
            except Exception:
                log.exception("a periodic duty failed")  # the others have nothing to do with it

    def _probe_with(
        self, tasks: dict[str, asyncio.Task[None]], peer: str, probe: Callable[[str], Coroutine[Any, Any, None]]
    ) -> None:
        tasks[peer] = asyncio.get_running_loop().create_task(probe(peer))
        tasks[peer].add_done_callback(lambda _: tasks.pop(peer, None))

    async def _look(self, peer: str) -> None:
        """Whether it is still there: the probe that is under way may have gone to one that was being killed.

        Until its memory is freed, a tenth of a second and more, the system takes messages for a process that is dead.
        """
        with suppress(TimeoutError, MotetError):  # the probe that is under way will tell
            await self._answers(peer, PERIOD)

    async def _ask(self, peer: str) -> None:
        try:
            if await self._answers(peer, PROBE_TIMEOUT):
                self._unanswered.pop(peer, None)
        except TimeoutError:
            self._unanswered[peer] = self._unanswered.get(peer, 0.0) + PROBE_TIMEOUT
            if self._unanswered[peer] >= CALLER_SILENCE:
                self._lost(peer, f"no answer for {self._unanswered[peer]:g} s")
        except MotetError:
            pass  # our own connection

    async def _answers(self, peer: str, timeout: float) -> bool:
        """False: nobody serves it; if so for good, it is lost. Raises TimeoutError."""
        try:
            await self._control.request(subjects.control_at(peer), self._probe, timeout=timeout)
        except NoResponders:
            if await self._is_really_gone(peer):
                self._lost(peer, "nobody serves it any more")
            return False
        return True

    async def _is_really_gone(self, peer: str) -> bool:
        """After a restart of NATS a living peer may reconnect a moment later than we did: ask once more."""
        await self._clock.sleep(PERIOD / 2)
        try:
            await self._control.request(subjects.control_at(peer), self._probe, timeout=PROBE_TIMEOUT)
        except NoResponders:
            return True
        except (TimeoutError, MotetError):
            return False
        return False

    def _lost(self, peer: str, why: str) -> None:
        log.warning("lost %s: %s", peer, why)
        for tasks in (self._probing, self._looking):
            if (task := tasks.get(peer)) is not None and task is not asyncio.current_task():
                task.cancel()
        self._unanswered.pop(peer, None)
        self._caller.lost(peer, why)
        self._calls.caller_lost(peer)
