"""A TCP proxy on loopback that delays bytes and can be cut, for servers on one machine.

    async with TcpProxy(target_port, delay=0.05) as proxy:
        connect(proxy.port)
        with proxy.cut():
            ...

Bytes leave `delay` seconds after they came, each way, in order; the round trip grows by twice that. TCP ends at the
proxy, so that no handshake or window of a connection is slower: `long_line` delays packets instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

HOST = "127.0.0.1"
CHUNK = 16 << 10
QUEUED = 64  # chunks of one direction that are on their way; a sender waits for more


class TcpProxy:
    """Accept connections at `port` and pass them on to port `target`. delay: seconds each way."""

    def __init__(self, target: int, *, delay: float = 0.0):
        self._target, self._delay = target, delay
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Let nothing through in the block; no connection is told. New ones are accepted, and silent too."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            back, far = await asyncio.open_connection(HOST, self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, far))
                group.create_task(self._pass(back, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one direction on until its end, which ends the connection."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUED)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(reader, queue))
            group.create_task(self._write(queue, writer))

    async def _read(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(CHUNK):
            await queue.put((loop.time() + self._delay, data))
        await queue.put((loop.time() + self._delay, b""))

    async def _write(
        self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - loop.time())
            await self._open.wait()
            if not data:
                raise ConnectionResetError("the other end is done")
            writer.write(data)
            await writer.drain()
