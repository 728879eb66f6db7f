"""Run the gateway as an actor: uvicorn in the process's one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from motet_gateway.batches.runner import BatchRunner
from motet_gateway.http.app import App
from motet_gateway.http.chunks import ChunkProtocol, State
from motet_gateway.http.connections.bounds import Bounds
from motet_gateway.http.connections.open_files import room_for
from motet_gateway.http.connections.tls_entry import TlsEntry
from motet_gateway.http.tls import check_tls
from motet_gateway.http.websocket import BurstProtocol
from motet_gateway.kept.absent import Arrivals
from motet_gateway.kept.intake import Intake
from motet_gateway.responses.background import BackgroundResponses
from motet_gateway.storage.jetstream import ERRORS
from motet_shared.errors import ConfigError, InternalError
from motet_shared.process.actor import Actor
from motet_shared.process.telemetry import Metrics
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import HEARTBEAT_EVERY

from .config import GatewayConfig
from .context import GatewayContext

log = logging.getLogger(__name__)

_TICKS = 10.0  # iterations of uvicorn's main loop per second
_BACKLOG = 2048
_CLOSING = 2  # seconds for clients to read their last bytes
_FINAL_ACCEPT = 1.0  # seconds in which connections that will be closed still accept requests
_LAST_REQUESTS = 10.0  # seconds in which requests that have come are admitted before a drain
_STORE_EVERY = 5.0  # seconds between two looks for JetStream where there was none


class Gateway(Actor):
    """Serve HTTP from `warm` to `close`; serves no operations on the bus."""

    role = "gateway"
    config: GatewayConfig

    def __init__(self, config: GatewayConfig, bus: Bus):
        super().__init__(config, bus)
        self.port = 0
        self.service: GatewayContext | None = None
        self._background: BackgroundResponses | None = None
        self._batches: BatchRunner | None = None
        self._opening: asyncio.Task[None] | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def warm(self) -> None:
        """Open the listener and start the HTTP server.

        Raises ConfigError if the address, the certificate or the tenants file cannot be used.
        """
        if self.config.tls_cert is not None and self.config.tls_key is not None:
            check_tls(self.config.tls_cert, self.config.tls_key)
        self.service = GatewayContext(
            self.config, self.bus, self.metrics or Metrics(self.role, self.bus.instance)
        )
        if await self.service.open_store():
            self._start_background(self.service)
        else:
            self._opening = asyncio.create_task(self._open_later(self.service), name="store")
        self.service.watch()
        store = self.config.descriptor_store
        if self.config.listen_fd is not None or store is not None:
            await asyncio.sleep(HEARTBEAT_EVERY + 0.1)  # discover all instances before serving
        listeners = [_listen(self.config)] if store is None else []
        self.port = listeners[0].getsockname()[1] if listeners else self.config.port
        self.service.connections.most = room_for(self.config.max_connections)
        state = State(_bounds(self.config), self.service.connections)
        config = _uvicorn_config(self.config, App(self.service))
        self._server = _Server(config, state, store, self.service.sessions.arrivals)
        self._serving = asyncio.create_task(self._server.serve(sockets=listeners), name="http")
        self._serving.add_done_callback(self._on_server_end)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        scheme = "http" if self.config.tls_cert is None else "https"
        log.info("listening on %s://%s:%d", scheme, host, self.port, extra={"port": self.port})

    async def _open_later(self, service: GatewayContext) -> None:
        """Open the stores as soon as NATS has JetStream.

        It may be behind a leaf that has no connection yet, or elect a leader.
        """
        while True:
            await asyncio.sleep(_STORE_EVERY)
            try:
                if await service.open_store():
                    break
            except ERRORS as error:
                log.warning("the stores cannot be opened yet: %s %s", type(error).__name__, error)
        self._start_background(service)
        log.info("JetStream has been found: what is to be stored is stored from now on")

    def _start_background(self, service: GatewayContext) -> None:
        """Run what clients do not wait for, if there is a store."""
        if service.responses is not None and service.response_queue is not None:
            self._background = BackgroundResponses(
                service, service.responses, service.response_queue
            )
            self._background.start(self.config.background_responses)
        files, batches, queue = service.files, service.batches, service.batch_queue
        if files is not None and batches is not None and queue is not None:
            self._batches = BatchRunner(service, files, batches, queue)
            self._batches.start(self.config.batches)

    async def close(self) -> None:
        """Refuse new requests, let running ones end within the drain timeout, then stop."""
        if self.service is None or self._server is None or self._serving is None:
            return
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        has_successor = (
            self.config.listen_fd is not None or self.config.descriptor_store is not None
        )
        if has_successor:
            await self._server.leave()
        drained = asyncio.ensure_future(self._drained(self._server, self.service, has_successor))
        hurry = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait(
            [drained, hurry], timeout=self.config.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if not drained.done():
            log.warning(
                "%d replies are cut off by the end of the drain", self.service.limits.active
            )
        for task in (drained, hurry):
            task.cancel()
        await asyncio.gather(drained, hurry, return_exceptions=True)
        self._server.should_exit = True
        await self._serving
        await self.service.close()

    async def _drained(self, server: _Server, service: GatewayContext, has_successor: bool) -> None:
        if has_successor:
            await server.answer_last()
        service.limits.draining = True
        if self._background is not None:
            await self._background.close()
        if self._batches is not None:
            await self._batches.close()
        await service.sessions.close()
        await asyncio.gather(*(session.drain() for session in service.sessions))
        await service.limits.idle.wait()

    def load(self) -> dict[str, float]:
        if self.service is None:
            return {}
        counts = {
            "streams": float(self.service.limits.active),
            "sockets": float(self.service.sessions.connected),
        }
        return counts | (self._server.load() if self._server is not None else {})

    def stats(self) -> dict[str, Any]:
        refused = self.service.limits.refused if self.service is not None else 0
        return {**self.load(), "refused": refused, "port": self.port}

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.service is None:
            return
        if self.service.limits.active < 0:
            raise RuntimeError(
                f"{self.service.limits.active} active replies: a slot was released twice"
            )
        self.service.authenticator.check_integrity()

    def _on_server_end(self, task: asyncio.Task[None]) -> None:
        """Crash the process if the HTTP server ends without a request to stop."""
        if not task.cancelled() and not (self._server and self._server.should_exit):
            self.crash(task.exception() or InternalError("the HTTP server ended by itself"))


class _Server(uvicorn.Server):
    """Run uvicorn without its signal handlers, since the actor's runtime has its own."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: State,
        store: Path | None = None,
        arrivals: Arrivals | None = None,
    ):
        """Configure the server.

        store: socket of the descriptor store that accepts for it. arrivals: of sessions whose
        clients are away.
        """
        super().__init__(config)
        self._store, self._arrivals = store, arrivals
        self._intake: Intake | None = None
        self.server_state = self._state = state
        # An exceeded time limit is detected at most a quarter of it later, and at most a second.
        self._check_every = max(1, min(round(_TICKS), int(state.bounds.shortest * _TICKS / 4)))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen.

        uvicorn's own method would count a TLS connection only after its handshake.
        """
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        context = self.config.ssl

        def http() -> ChunkProtocol:
            return ChunkProtocol(self.config, self._state, self.lifespan.state, loop)

        def entry() -> asyncio.Protocol:
            return http() if context is None else TlsEntry(self._state, context, http)

        if self._store is not None:
            self._intake = Intake(self._store, http, self._arrivals)
            await self._intake.start()
        self.servers = [
            await loop.create_server(entry, sock=listener, backlog=self.config.backlog)
            for listener in sockets or ()
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % self._check_every == 0:
            now = asyncio.get_running_loop().time()
            for connection in tuple(self._state.connections):
                if isinstance(connection, ChunkProtocol | BurstProtocol):
                    connection.check_time(now)
        return await super().on_tick(counter)

    def load(self) -> dict[str, float]:
        """Return the HTTP requests since the start, replies whose clients do not read, and adopted
        connections behind a descriptor store.
        """
        return {
            "http_requests": float(self._state.total_requests),
            "unread_replies": float(self._state.readers.unwritten),
        } | ({"adopted": float(self._intake.adopted)} if self._intake is not None else {})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._intake is not None:
            self._intake.close()

    async def leave(self) -> None:
        """Stop accepting connections and close idle ones; clients reconnect to a successor.

        The successor listens on the same socket. A reply to a request that arrives now, or is in
        progress, is the last on its connection.
        """
        for server in self.servers:
            server.close()
        if self._intake is not None:
            self._intake.leave()
        self._state.leaving = True
        await asyncio.sleep(_FINAL_ACCEPT)
        for connection in list(self.server_state.connections):
            if isinstance(connection, ChunkProtocol) and not connection.has_unread:
                connection.shutdown()

    async def answer_last(self) -> None:
        """Wait until responses to all requests that have come have begun, for a bounded time.

        A request whose body is being received was accepted: it is not refused for what came later.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_REQUESTS):
                while any(  # noqa: ASYNC110  (uvicorn's connections have no event for it)
                    connection.is_unanswered
                    for connection in self.server_state.connections
                    if isinstance(connection, ChunkProtocol)
                ):
                    await asyncio.sleep(0.05)


def _bounds(config: GatewayConfig) -> Bounds:
    return Bounds(
        head_bytes=config.max_head,
        header_fields=config.max_header_fields,
        head_seconds=config.head_timeout,
        idle_seconds=config.idle_timeout,
        body_seconds=config.body_timeout,
        body_rate=config.body_rate,
    )


def _uvicorn_config(config: GatewayConfig, app: App) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=ChunkProtocol,
        ws=BurstProtocol,
        ws_max_size=config.max_message,
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-For is read by `ConnectionCounts`
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=math.ceil(config.idle_timeout),
        timeout_graceful_shutdown=_CLOSING,
    )


def _listen(config: GatewayConfig) -> socket.socket:
    host, port = config.host, config.port
    if config.listen_fd is not None:
        return _inherited(config.listen_fd)
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, proto, _, address = found[0]
        with contextlib.ExitStack() as unless_bound:
            listener = unless_bound.enter_context(socket.socket(family, kind, proto))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            unless_bound.pop_all()
    except OSError as error:
        message = f"port: cannot listen on {host}:{port}: {error.strerror}; choose another, 0 for any free one"
        raise ConfigError(message, param="port") from None
    listener.setblocking(False)
    return listener


def _inherited(fd: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        message = (
            f"listen_fd: {fd} is not a socket: {error.strerror}; leave it out to listen on --port"
        )
        raise ConfigError(message, param="listen_fd") from None
    listener.setblocking(False)
    return listener
