"""Run the periodic duties of one process: probes of peers, keepalives, resends, deadlines, heartbeats.

Every 100 ms each peer that shares streams with this process is probed, with one request per
instance however many streams there are. A dead process bounces the probe with no-responders within
a millisecond; a process that hangs is detected by missing keepalives (a worker) or unanswered probes (a
caller).

Silence is counted in this process's own ticks, and a late tick counts no more than its period: when
this machine is starved of CPU, its clock is starved too, and no peer is declared dead for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from motet_shared.errors import MotetError
from motet_shared.messages import PROTOCOL, Controls, encode
from motet_shared.process.clock import Clock

from . import subjects
from .broker import Broker
from .call import Calls
from .stream import Caller
from .transport import NoResponders, Transport

log = logging.getLogger(__name__)

PERIOD = 0.1
PROBE_TIMEOUT = 1.0
CALLER_SILENCE = 5.0  # seconds after which a caller that answers no probe is considered lost


class Monitor:
    """Run every periodic duty of a process in one task."""

    def __init__(
        self,
        caller: Caller,
        calls: Calls,
        control: Transport,
        clock: Clock,
        broker: Broker | None = None,
    ):
        self._caller = caller
        self._calls = calls
        self._control = control
        self._clock = clock
        self.broker = broker or Broker([control])
        self._probing: dict[str, asyncio.Task[None]] = {}
        # second probes, sent while the first is unanswered
        self._second_probes: dict[str, asyncio.Task[None]] = {}
        self._unanswered: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._probe = encode(Controls(PROTOCOL, caller.instance, []))
        self.duties: list[Callable[[float], Awaitable[None]]] = []
        self.lag = 0.0  # lateness of the last tick, seconds
        self.late = 0.0  # total lateness of all ticks, seconds

    def start(self) -> None:
        """Start the monitor's task."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="monitor")

    async def close(self) -> None:
        """Cancel the monitor's task and all probes."""
        tasks = [
            *self._probing.values(),
            *self._second_probes.values(),
            *([self._task] if self._task else []),
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.broker.close()

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
        """Run one period: broker echoes, calls, streams, probes of peers, and further duties."""
        counted = self.broker.tick(PERIOD)
        self._calls.tick(PERIOD)
        await self._caller.tick(counted, PERIOD)
        if self.broker.answers:
            for peer in self._calls.callers() | self._caller.by_peer.keys():
                if peer not in self._probing:
                    self._probe_with(self._probing, peer, self._probe_peer)
                elif peer not in self._second_probes:
                    self._probe_with(self._second_probes, peer, self._probe_again)
        for duty in self.duties:
            try:
                await duty(PERIOD)
            except Exception:
                log.exception("a periodic duty failed")  # the other duties still run

    def _probe_with(
        self,
        tasks: dict[str, asyncio.Task[None]],
        peer: str,
        probe: Callable[[str], Coroutine[Any, Any, None]],
    ) -> None:
        tasks[peer] = asyncio.get_running_loop().create_task(probe(peer))
        tasks[peer].add_done_callback(lambda _: tasks.pop(peer, None))

    async def _probe_again(self, peer: str) -> None:
        """Probe a peer again while a probe is unanswered, since that one may reach a dying process.

        Until its memory is freed, which takes a tenth of a second or more, the system accepts
        messages for a dead process.
        """
        with suppress(TimeoutError, MotetError):  # the pending probe decides
            await self._answers(peer, PERIOD)

    async def _probe_peer(self, peer: str) -> None:
        """Probe a peer; declare it lost after `CALLER_SILENCE` seconds without an answer."""
        before = self.broker.counted
        try:
            if await self._answers(peer, PROBE_TIMEOUT):
                self._unanswered.pop(peer, None)
                await self._caller.reached(peer)
        except TimeoutError:
            waited = (
                min(self.broker.counted - before + PERIOD, PROBE_TIMEOUT)
                if self.broker.settled
                else 0.0
            )
            self._unanswered[peer] = self._unanswered.get(peer, 0.0) + waited
            if self._unanswered[peer] >= CALLER_SILENCE:
                self._lost(peer, f"no answer for {self._unanswered[peer]:g} s")
        except MotetError:
            pass  # this process's own connection failed

    async def _answers(self, peer: str, timeout: float) -> bool:
        """Probe a peer; return False if its subject has no subscriber.

        The peer is declared lost if a second probe confirms it. Raises TimeoutError.
        """
        try:
            await self._control.request(subjects.control_at(peer), self._probe, timeout=timeout)
        except NoResponders:
            if await self._is_really_gone(peer):
                self._lost(peer, "no process serves it any more")
            return False
        return True

    async def _is_really_gone(self, peer: str) -> bool:
        """Probe a peer once more, since a live peer may reconnect later than this process."""
        if not self.broker.peers_are_back:
            return False
        await self._clock.sleep(PERIOD / 2)
        try:
            await self._control.request(
                subjects.control_at(peer), self._probe, timeout=PROBE_TIMEOUT
            )
        except NoResponders:
            return self.broker.peers_are_back
        except (TimeoutError, MotetError):
            return False
        return False

    def _lost(self, peer: str, why: str) -> None:
        log.warning("lost %s: %s", peer, why)
        for tasks in (self._probing, self._second_probes):
            if (task := tasks.get(peer)) is not None and task is not asyncio.current_task():
                task.cancel()
        self._unanswered.pop(peer, None)
        self._caller.lost(peer, why)
        self._calls.caller_lost(peer)
