"""Serve llama.cpp as an engine: a running llama-server, or one that the host starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from motet_engines.config import EnginesConfig
from motet_engines.engine import CrashHandler, Served
from motet_engines.openai.engine import OpenAIEngine
from motet_shared.errors import Unavailable

from .server import LlamaServer


class LlamaCppEngine(OpenAIEngine):
    """Drive a llama-server: the one of `engine_url`, or one of its own in `engine_python`."""

    def __init__(self, config: EnginesConfig):
        self._own = None if config.engine_url else LlamaServer(config)
        self._watch: asyncio.Task[None] | None = None
        if self._own is not None:
            config = replace(config, engine_url=self._own.url, engine_python="")
        super().__init__(config)

    async def _start(self, on_health: Callable[[bool], None], on_crash: CrashHandler) -> Served:
        if self._own is not None:
            await self._own.start()
            self._watch = asyncio.create_task(self._watch_server(self._own, on_crash))
        return await super()._start(on_health, on_crash)

    async def _watch_server(self, server: LlamaServer, on_crash: CrashHandler) -> None:
        status = await server.ended()
        on_crash(Unavailable(f"llama-server ended with status {status}"))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await super().close()
        if self._own is not None:
            await self._own.close()
