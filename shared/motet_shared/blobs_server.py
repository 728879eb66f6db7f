"""The owner's side of blobs over TCP: a small server that stays up whatever it is sent.

The protocol is in `blobs_tcp`. Connections, transfers under way, message sizes and silences are all bounded. It
listens on loopback unless told otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import msgspec

from motet_shared.blobs_tcp import (
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
from motet_shared.errors import BlobError, MotetError, Overloaded

log = logging.getLogger(__name__)


class Lender(Protocol):
    """What the server serves (`blobs_shelf.Shelf`). All calls are quick."""

    def lend(self, request: Get) -> AbstractContextManager[memoryview]:
        """The bytes; they cannot be overwritten while they are lent. Raises BlobError."""

    def release(self, keys: list[str], reader: str) -> None: ...

    def renew(self, key: str, reader: str) -> None:
        """Raises BlobError if the blob is gone."""


class BlobServer:
    """Serves a shelf. At most `connections` at once (more are told to come back) and `transfers` under way."""

    def __init__(
        self, shelf: Lender, *, connections: int = 64, transfers: int = 4, patience: float = 10.0, idle: float = 120.0
    ):
        self._shelf, self._limit, self._patience, self._idle = shelf, connections, patience, idle
        self._transfers = asyncio.Semaphore(transfers)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.refused = 0  # connections over the limit, and messages that made no sense

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises BlobError if the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise BlobError(f"blob server: cannot listen on {host}:{port}: {error.strerror}") from None
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await asyncio.sleep(0)  # a flood of connections, refused ones too, must not stop those there are
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:  # out of descriptors, most likely: others will be closed
                log.warning("blob server cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) >= 2 * self._limit:
                sock.close()
                continue
            serve = self._serve if len(self._tasks) < self._limit else self._refuse
            task = asyncio.create_task(serve(sock))
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._served, sock))

    def _served(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        sock.close()  # a task that is cancelled before its first step has not come to it

    async def _refuse(self, sock: socket.socket) -> None:
        self.refused += 1
        with sock, suppress(OSError):
            await self._fail(prepare(sock), Overloaded(f"blob server has its {self._limit} connections; try again"))
            await self._part(sock)

    async def _part(self, sock: socket.socket) -> None:
        """Let the other side read our last words: closing with its bytes unread would reset the connection."""
        sock.shutdown(socket.SHUT_WR)
        loop, scrap = asyncio.get_running_loop(), bytearray(64 << 10)
        async with asyncio.timeout(1.0):
            while await loop.sock_recv_into(sock, scrap):
                pass

    async def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, Closed):
            prepare(sock)
            while await self._answer_next(sock):
                pass

    async def _answer_next(self, sock: socket.socket) -> bool:
        """Answer one request; False if the connection cannot go on."""
        try:
            request = decode_request(await receive_message(sock, self._idle, self._patience))
        except (BlobError, msgspec.MsgspecError) as error:
            self.refused += 1
            await self._fail(sock, BlobError(f"malformed blob request: {error}"))
            await self._part(sock)
            return False
        try:
            if isinstance(request, Get):
                await self._transfer(sock, request)
                return True
            if isinstance(request, Release):
                self._shelf.release(request.keys[:MAX_KEYS], request.reader)
            else:
                self._shelf.renew(request.key, request.reader)
        except MotetError as error:
            await self._fail(sock, error)
        else:
            await send(sock, message(Ok()), self._patience)
        return True

    async def _fail(self, sock: socket.socket, error: MotetError) -> None:
        await send(sock, message(Failed(error.code, error.message[:1000])), self._patience)

    async def _transfer(self, sock: socket.socket, request: Get) -> None:
        try:
            async with asyncio.timeout(self._patience / 2):
                await self._transfers.acquire()
        except TimeoutError:
            raise Overloaded("blob server has all its transfers under way; try again") from None
        try:
            with self._shelf.lend(request) as data:
                await send(sock, message(Ok(len(data))), self._patience)
                await send(sock, data, self._patience)
        finally:
            self._transfers.release()


async def _readable(listener: socket.socket) -> None:
    """Wait for a connection. Not `loop.sock_accept`: cancelled too late, it forgets the one that it has accepted."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)
