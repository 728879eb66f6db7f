"""A TCP proxy that delays bytes, limits their rate, and can be cut: a long line in user space.

    async with TcpProxy(target_port, delay=0.05, rate=125_000) as proxy:
        connect(proxy.port)
        with proxy.cut():
            ...

    python -m support.peers.tcp_proxy LISTEN_HOST:PORT TARGET_HOST:PORT --delay-ms 50 --rate 125000

Bytes leave `delay` seconds after they came, each way, in order; the round trip grows by twice that. TCP ends at the
proxy, so that no handshake or window of a connection is slower: a lower bound of what a line of that length costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK = 16 << 10
QUEUED = 64  # chunks of one direction that are on their way; a sender waits for more


class TcpProxy:
    """Accept connections at `port` and pass them on. delay: seconds each way; rate: bytes per second of each direction
    of each connection, 0: unlimited."""

    def __init__(
        self,
        target: int | tuple[str, int],
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        delay: float = 0.0,
        rate: float = 0.0,
    ):
        self._target = ("127.0.0.1", target) if isinstance(target, int) else target
        self._listen, self.delay, self.rate = listen, delay, rate
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._accept, *self._listen)
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

    def disconnect(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            back, far = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, far))
                group.create_task(self._pass(back, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()
            self._writers.discard(writer)
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
        loop, free = asyncio.get_running_loop(), 0.0
        while data := await reader.read(CHUNK):
            free = max(free, loop.time()) + (len(data) / self.rate if self.rate else 0.0)
            await queue.put((free + self.delay, data))
        await queue.put((loop.time() + self.delay, b""))

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


async def _run(args: argparse.Namespace) -> None:
    (listen, port), (target, target_port) = (
        (host, int(number))
        for host, _, number in (text.rpartition(":") for text in (args.listen, args.target))
    )
    proxy = TcpProxy(
        (target, target_port),
        listen=(listen, port),
        delay=args.delay_ms / 1000,
        rate=args.rate,
    )
    async with proxy:
        await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("listen", metavar="HOST:PORT")
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second each way")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(parser.parse_args()))
