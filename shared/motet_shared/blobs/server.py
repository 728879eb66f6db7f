"""Serve blobs over TCP from their owner, robustly against malformed input.

The protocol is in `blobs.tcp`. With TLS, only clients with a certificate of the stack's CA are
served. Connections, concurrent transfers, message sizes and silences are all bounded. The server
listens on loopback unless configured otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import msgspec

from motet_shared.blobs.tcp import (
    MAX_KEYS,
    Closed,
    Failed,
    Get,
    Ok,
    Release,
    decode_request,
    message,
    prepare,
    receive_message,
    send,
)
from motet_shared.blobs_socket import receive_into, secure
from motet_shared.errors import BlobError, MotetError, Overloaded

log = logging.getLogger(__name__)


class Lender(Protocol):
    """Define the blob source of the server (`blobs.published.PublishedBlobs`). All calls are quick."""

    def lend(self, request: Get) -> AbstractContextManager[memoryview]:
        """Return the bytes in a context in which they cannot be overwritten. Raises BlobError."""

    def release(self, keys: list[str], reader: str) -> None: ...

    def renew(self, key: str, reader: str) -> None:
        """Restart the blob's ttl; raise BlobError if the blob is gone."""


class BlobServer:
    """Serve published blobs with at most `connections` connections and `transfers` concurrent transfers.

    A further connection ends the one that has waited longest for a request; if all are busy, it is
    refused as Overloaded. Clients repeat requests on connections that were ended.
    """

    def __init__(
        self,
        published: Lender,
        *,
        connections: int = 64,
        transfers: int = 4,
        patience: float = 10.0,
        idle: float = 120.0,
        tls: ssl.SSLContext | None = None,
    ):
        self._published, self._limit, self._patience, self._idle = (
            published,
            connections,
            patience,
            idle,
        )
        self._tls = tls
        self._transfers = asyncio.Semaphore(transfers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._resting: dict[asyncio.Task[None], None] = {}  # without a request, longest first
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.refused = 0  # connections over the limit, and malformed messages

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; raise BlobError if the address is not available."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise BlobError(
                f"blob server: cannot listen on {host}:{port}: {error.strerror}"
            ) from None
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    @property
    def open_connections(self) -> int:
        """Return the number of open connections."""
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel all connections and stop listening."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            # A flood of connections, even of refused ones, must not starve existing ones.
            await asyncio.sleep(0)
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:  # most likely out of descriptors: other connections will close
                log.warning("blob server cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) >= 2 * self._limit:
                sock.close()
                continue
            has_room = len(self._tasks) < self._limit or self._end_resting()
            serve = self._serve if has_room else self._refuse
            task = asyncio.create_task(serve(sock))
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._served, sock))

    def _end_resting(self) -> bool:
        """End the connection that has waited longest for a request; return False if none waits."""
        task = next(iter(self._resting), None)
        if task is None:
            return False
        del self._resting[task]
        task.cancel()
        return True

    def _served(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._resting.pop(task, None)
        sock.close()  # a task that is cancelled before its first step has not closed it

    async def _refuse(self, sock: socket.socket) -> None:
        self.refused += 1
        if self._tls is not None:  # a TLS handshake costs more than the answer is worth
            sock.close()
            return
        with sock, suppress(OSError):
            await self._fail(
                prepare(sock),
                Overloaded(f"blob server has its {self._limit} connections; try again"),
            )
            await self._close_gracefully(sock)

    async def _close_gracefully(self, sock: socket.socket) -> None:
        """Let the peer read the last message before closing.

        Closing with its bytes unread would reset the connection.
        """
        sock.shutdown(socket.SHUT_WR)
        scrap = memoryview(bytearray(64 << 10))
        async with asyncio.timeout(1.0):
            while await receive_into(sock, scrap):
                pass

    async def _serve(self, sock: socket.socket) -> None:
        prepare(sock)
        if self._tls is not None:
            try:
                async with asyncio.timeout(self._patience):
                    sock = await secure(sock, self._tls, server=True)
            except OSError as error:  # includes TimeoutError and ssl.SSLError
                self.refused += 1
                log.warning(
                    "blob server: a connection without a certificate of this stack was refused: %s",
                    error,
                )
                sock.close()
                return
        with sock, suppress(OSError, Closed):
            while await self._answer_next(sock):
                pass

    async def _answer_next(self, sock: socket.socket) -> bool:
        """Answer one request; return False if the connection cannot continue."""
        try:
            request = decode_request(await self._next_message(sock))
        except (BlobError, msgspec.MsgspecError) as error:
            self.refused += 1
            await self._fail(sock, BlobError(f"malformed blob request: {error}"))
            await self._close_gracefully(sock)
            return False
        try:
            if isinstance(request, Get):
                await self._transfer(sock, request)
                return True
            if isinstance(request, Release):
                self._published.release(request.keys[:MAX_KEYS], request.reader)
            else:
                self._published.renew(request.key, request.reader)
        except MotetError as error:
            await self._fail(sock, error)
        else:
            await send(sock, message(Ok()), self._patience)
        return True

    async def _next_message(self, sock: socket.socket) -> bytes:
        """Receive a message; until it begins, the connection may be ended for another one."""
        task = asyncio.current_task()
        assert task is not None
        self._resting[task] = None
        begun = functools.partial(self._resting.pop, task, None)
        return await receive_message(sock, self._idle, self._patience, begun)

    async def _fail(self, sock: socket.socket, error: MotetError) -> None:
        await send(sock, message(Failed(error.code, error.message[:1000])), self._patience)

    async def _transfer(self, sock: socket.socket, request: Get) -> None:
        try:
            async with asyncio.timeout(self._patience / 2):
                await self._transfers.acquire()
        except TimeoutError:
            raise Overloaded("blob server has all its transfers under way; try again") from None
        try:
            with self._published.lend(request) as data:
                await send(sock, message(Ok(len(data))), self._patience)
                await send(sock, data, self._patience)
        finally:
            self._transfers.release()


async def _readable(listener: socket.socket) -> None:
    """Wait for a connection to accept.

    `loop.sock_accept` is not used: if cancelled too late, it leaks the connection it has accepted.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)
