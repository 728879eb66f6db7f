"""Serve a server with OpenAI's API as an engine: choose a route, send requests, watch its health."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec

from motet_engines.config import EnginesConfig
from motet_engines.continuation import remaining, scores_prompt
from motet_engines.engine import CrashHandler, Features, Served, StepOutput
from motet_engines.pictures import Picture
from motet_shared.errors import ConfigError, MotetError, Unavailable
from motet_shared.messages import Generate, ScoredToken

from .connection import Connection
from .health import Health
from .prompt_scores import read_scores, scores_body
from .route import Route
from .routes import choose_picture_route, choose_route
from .server import Server, read_server

log = logging.getLogger(__name__)

_RETRY = 0.5  # seconds between attempts to reach a server that is not up yet
_REPORT = 10.0  # seconds between log lines about it


class OpenAIEngine:
    """Drive one model of one server."""

    def __init__(self, config: EnginesConfig):
        self._config = config
        self._connection = Connection(config.engine_url, config.engine_key, config.engine_timeout)
        self._server: Server | None = None
        self._route: Route | None = None
        self._picture_route: Route | None = None
        self._health: Health | None = None

    @property
    def features(self) -> Features:
        route = self._picture_route
        return replace(self._chosen.features, pictures=None if route is None else route.features)

    @property
    def _chosen(self) -> Route:
        if self._route is None:
            raise RuntimeError("the engine has not started")
        return self._route

    async def start(self, on_health: Callable[[bool], None], on_crash: CrashHandler) -> Served:
        """Wait for the server, and choose how requests are sent to it. Raises MotetError."""
        try:
            return await self._start(on_health, on_crash)
        except BaseException:
            await self.close()
            raise

    async def _start(self, on_health: Callable[[bool], None], on_crash: CrashHandler) -> Served:
        config = self._config
        self._server = server = await self._reach()
        self._route = await choose_route(self._connection, server, config)
        self._picture_route = await choose_picture_route(self._connection, server, config)
        log.info("route chosen", extra=self.describe())
        self._health = Health(self._connection, server.dialect.load, config.engine_probe, on_health)
        self._health.start(on_crash)
        adapters = tuple(name for name in server.adapters if name != config.model_name)
        return Served(context=server.context, adapters=adapters)

    async def _reach(self) -> Server:
        """Return the server as soon as it lists its models. Raises ConfigError for a wrong key."""
        waited = 0.0
        while True:
            try:
                return await read_server(self._connection, self._config)
            except Unavailable as error:
                if "engine_key" in error.message:
                    raise ConfigError(error.message, param="engine_key") from None
                if waited % _REPORT < _RETRY:
                    log.warning("waiting for the engine's server: %s", error.message)
            waited += _RETRY
            await asyncio.sleep(_RETRY)

    async def generate(
        self,
        key: str,
        request: Generate,
        expires: float | None,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[StepOutput, None]:
        route = self._chosen
        if pictures and self._picture_route is not None:
            route = self._picture_route
            body = await asyncio.to_thread(self._body, route, request, pictures)
        else:
            body = self._body(route, request)
        reply = route.reply(request)
        try:
            if scores_prompt(request):
                yield StepOutput(scores=await self._scores(request))
                if remaining(request) <= 0:
                    yield StepOutput(finish="length")
                    return
            async with aclosing(self._connection.events(route.path, body)) as events:
                async for data in events:
                    output = reply.feed(data)
                    if output is not None:
                        yield output
                        if output.finish:  # an end token that the server does not know of
                            return
            yield reply.end()
        except Unavailable:
            self._suspect()
            raise

    def _body(self, route: Route, request: Generate, pictures: Sequence[Picture] = ()) -> bytes:
        return msgspec.json.encode(route.body(request, pictures) | self._adapter(request))

    def _adapter(self, request: Generate) -> dict[str, str]:
        """Return the field that names an adapter of the server; none for its model itself."""
        server = self._server
        is_adapter = server is not None and request.model in server.adapters
        return {"model": request.model} if is_adapter else {}

    async def _scores(self, request: Generate) -> list[ScoredToken]:
        """Return the log-probabilities of a prompt, which servers do not stream."""
        server = self._server
        if server is None:
            raise RuntimeError("the engine has not started")
        body = scores_body(request, server.model, server.dialect) | self._adapter(request)
        return read_scores(await self._connection.post("/completions", body), request)

    def _suspect(self) -> None:
        if self._health is not None:
            self._health.suspect()

    def load(self) -> dict[str, float]:
        return {} if self._health is None else self._health.load

    def describe(self) -> dict[str, object]:
        found: dict[str, Any] = {"engine_url": self._connection.url}
        if self._server is not None:
            found |= {
                "engine_dialect": self._server.dialect.name,
                "engine_model": self._server.model,
            }
        if self._route is not None:
            found["engine_route"] = self._route.name
        return found

    async def close(self) -> None:
        if self._health is not None:
            await self._health.close()
        with suppress(MotetError):
            await self._connection.close()
