"""Watch a server: whether it answers, and the load that it reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from motet_engines.engine import CrashHandler
from motet_shared.errors import MotetError

from .connection import Connection
from .server_load import read_load

log = logging.getLogger(__name__)

_FAILURES = 3  # probes without an answer after which a server counts as hanging
_CLOSE = 1.0  # seconds that the last probe has to end
_DOWN_PROBE = 0.25  # seconds between probes of a server that does not answer


class Health:
    """Probe a server periodically, and at once when a request to it has failed.

    on_health: called with False when it stops answering, with True when it is back. A server that
    accepts connections but does not answer breaks all its requests after three probes.
    """

    def __init__(
        self,
        connection: Connection,
        load_names: Mapping[str, str],
        every: float,
        on_health: Callable[[bool], None],
    ):
        self.load: dict[str, float] = {}
        self._connection = connection
        self._names = load_names
        self._every = every
        self._on_health = on_health
        self._is_up = True
        self._failures = 0
        self._suspected = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self, on_crash: CrashHandler) -> None:
        self._task = asyncio.create_task(self._run(), name="engine-health")
        self._task.add_done_callback(lambda task: _report(task, on_crash))

    def suspect(self) -> None:
        """Count the server as down until it answers the next probe, which is sent at once."""
        self._set(False)
        self._suspected.set()

    async def close(self) -> None:
        """Stop, after the probe in flight."""
        if self._task is not None:
            self._is_closing = True
            self._suspected.set()
            await asyncio.wait([self._task], timeout=_CLOSE)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while not self._is_closing:
            self._suspected.clear()
            await self._probe()
            pause = self._every if self._is_up else _DOWN_PROBE
            try:
                async with asyncio.timeout(pause):
                    await self._suspected.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)  # many requests fail together

    async def _probe(self) -> None:
        try:
            await self._connection.get("/models")
            if self._names:
                text = (await self._connection.get("//metrics")).decode("utf-8", "replace")
                self.load = read_load(text, self._names)
        except MotetError as error:
            await self._failed(error)
        else:
            self._failures = 0
            self._set(True)

    async def _failed(self, error: MotetError) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning("probe failed: %s", error.message)
        if self._failures >= _FAILURES:
            self.load = {}
            self._set(False)
        if self._failures == _FAILURES:
            await self._connection.reset()

    def _set(self, is_up: bool) -> None:
        if is_up != self._is_up:
            self._is_up = is_up
            self._on_health(is_up)


def _report(task: asyncio.Task[None], on_crash: CrashHandler) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        on_crash(error)
