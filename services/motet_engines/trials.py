"""Send one-token requests to keep an engine warm, or to test whether a failed one works again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing

from motet_shared.errors import MotetError, Overloaded
from motet_shared.messages import Chat, Generate, Sampling

from .breaker import Breaker
from .config import EnginesConfig
from .engine import CrashHandler, Engine
from .pace import Pace

log = logging.getLogger(__name__)

_SECONDS = 30.0  # that a trial may take
_TICK = 0.25  # seconds between looks at a host that is kept warm


class Trials:
    """Run trials while the breaker is open, and after `keep_warm` seconds without requests.

    on_change: called when the breaker has closed.
    """

    def __init__(
        self,
        config: EnginesConfig,
        engine: Engine,
        breaker: Breaker,
        pace: Pace,
        on_change: Callable[[], None],
    ):
        self._config, self._engine, self._breaker = config, engine, breaker
        self._pace, self._on_change = pace, on_change
        self._opened = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._number = 0

    def start(self, on_crash: CrashHandler) -> None:
        self._task = asyncio.create_task(self._run(), name="engine-trials")
        self._task.add_done_callback(
            lambda task: (
                None if task.cancelled() or (error := task.exception()) is None else on_crash(error)
            )
        )

    def wake(self) -> None:
        """Begin trials: the breaker has opened."""
        self._opened.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            if self._breaker.is_open:
                await asyncio.sleep(self._breaker.next_pause())
                if await self._trial():
                    self._breaker.succeeded()
                    self._on_change()
                continue
            self._opened.clear()
            await self._idle()

    async def _idle(self) -> None:
        """Wait until the breaker opens; meanwhile keep the engine warm."""
        keep_warm = self._config.keep_warm
        if not keep_warm:
            await self._opened.wait()
            return
        try:
            async with asyncio.timeout(min(keep_warm, _TICK)):
                await self._opened.wait()
        except TimeoutError:
            if time.monotonic() - self._pace.last_request >= keep_warm:
                self._pace.last_request = time.monotonic()
                await self._trial()

    async def _trial(self) -> bool:
        """Return True if the engine answers a request of one token."""
        self._number += 1
        try:
            async with asyncio.timeout(_SECONDS):
                outputs = self._engine.generate(f"trial-{self._number}", self._request(), None)
                async with aclosing(outputs):
                    async for output in outputs:
                        if output.ids or output.finish:
                            return True
        except Overloaded:
            return True
        except (MotetError, TimeoutError) as error:
            log.warning("trial failed: %s", error)
        return False

    def _request(self) -> Generate:
        model, sampling = self._config.model_name, Sampling(temperature=0.0, max_tokens=1)
        messages = [{"role": "user", "content": "Hello"}]
        chat = Chat(model=model, messages=messages, sampling=sampling, max_tokens=1)
        return Generate(model=model, prompt=[1], sampling=sampling, chat=chat)
