"""The gateway as an actor: uvicorn inside the process's one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from motet_shared.actor import Actor
from motet_shared.bus import Bus
from motet_shared.discovery import HEARTBEAT_EVERY
from motet_shared.errors import ConfigError, InternalError
from motet_shared.telemetry import Metrics

from .app import App
from .chunks import ChunkProtocol, State
from .config import GatewayConfig
from .service import Service
from .tls import check_tls
from .websocket import BurstProtocol

log = logging.getLogger(__name__)

_KEEP_ALIVE = 75.0  # seconds; longer than the 60 of common proxies, so that they close first
_BACKLOG = 2048
_CLOSING = 2  # seconds that clients get to take their last bytes
_LAST_CALL = 1.0  # seconds in which requests still come over connections that are to end


class Gateway(Actor):
    """Serves HTTP from `warm` to `close`; takes no operations over the bus."""

    role = "gateway"
    config: GatewayConfig

    def __init__(self, config: GatewayConfig, bus: Bus):
        super().__init__(config, bus)
        self.port = 0
        self.service: Service | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def warm(self) -> None:
        """Listen. ConfigError if the address, the certificate or the file of tenants cannot be had."""
        if self.config.tls_cert is not None and self.config.tls_key is not None:
            check_tls(self.config.tls_cert, self.config.tls_key)
        self.service = Service(self.config, self.bus, self.metrics or Metrics(self.role, self.bus.instance))
        await self.service.open_keep()
        self.service.watch()
        if self.config.listen_fd is not None:
            await asyncio.sleep(HEARTBEAT_EVERY + 0.1)  # who comes in at once finds everybody known
        listener = _listen(self.config)
        self.port = listener.getsockname()[1]
        self._server = _Server(_uvicorn_config(self.config, App(self.service)))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        self._serving.add_done_callback(self._on_server_end)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        scheme = "http" if self.config.tls_cert is None else "https"
        log.info("listening on %s://%s:%d", scheme, host, self.port, extra={"port": self.port})

    async def close(self) -> None:
        """Refuse what is new, let what runs end within the drain timeout, then stop listening."""
        if self.service is None or self._server is None or self._serving is None:
            return
        if self.config.listen_fd is not None:
            await self._server.leave()
        self.service.limits.draining = True
        drained = asyncio.ensure_future(self._drained(self.service))
        hurry = asyncio.ensure_future(self.hurry.wait())
        await asyncio.wait([drained, hurry], timeout=self.config.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            log.warning("%d replies are cut off by the end of the drain", self.service.limits.active)
        for task in (drained, hurry):
            task.cancel()
        await asyncio.gather(drained, hurry, return_exceptions=True)
        self._server.should_exit = True
        await self._serving
        await self.service.close()

    async def _drained(self, service: Service) -> None:
        await service.sessions.close()
        await asyncio.gather(*(session.drain() for session in service.sessions))
        await service.limits.idle.wait()

    def load(self) -> dict[str, float]:
        if self.service is None:
            return {}
        counts = {"streams": float(self.service.limits.active), "sockets": float(self.service.sessions.connected)}
        return counts | (self._server.load() if self._server is not None else {})

    def stats(self) -> dict[str, Any]:
        refused = self.service.limits.refused if self.service is not None else 0
        return {**self.load(), "refused": refused, "port": self.port}

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.service is None:
            return
        if self.service.limits.active < 0:
            raise RuntimeError(f"{self.service.limits.active} active replies: a slot was released twice")
        self.service.door.check_integrity()

    def _on_server_end(self, task: asyncio.Task[None]) -> None:
        """The server stops only when it is told to; anything else is the end of this process."""
        if not task.cancelled() and not (self._server and self._server.should_exit):
            self.crash(task.exception() or InternalError("the HTTP server ended by itself"))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the actor's runtime has its own."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.server_state = self._state = State()

    def load(self) -> dict[str, float]:
        """HTTP requests since the beginning, and replies whose clients do not read."""
        return {"http": float(self._state.total_requests), "unwritten": float(self._state.readers.unwritten)}

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def leave(self) -> None:
        """Leave new connections to whoever listens on the same socket, and send there those who are connected here.

        A reply to a request that comes now, or is under way, is the last of its connection.
        """
        for server in self.servers:
            server.close()
        self._state.leaving = True
        await asyncio.sleep(_LAST_CALL)
        for connection in list(self.server_state.connections):
            if isinstance(connection, ChunkProtocol) and not connection.has_unread:
                connection.shutdown()


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
        proxy_headers=False,  # nothing here asks for the address of a client
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=int(_KEEP_ALIVE),
        timeout_graceful_shutdown=_CLOSING,
    )


def _listen(config: GatewayConfig) -> socket.socket:
    host, port = config.host, config.port
    if config.listen_fd is not None:
        return _inherited(config.listen_fd)
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
        message = f"listen_fd: {fd} is no socket: {error.strerror}; leave it out to listen on --port"
        raise ConfigError(message, param="listen_fd") from None
    listener.setblocking(False)
    return listener
