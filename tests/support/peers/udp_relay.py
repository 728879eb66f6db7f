"""Relay datagrams between clients and a server on loopback, and lose some of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

LOOPBACK = "127.0.0.1"


class _Socket(asyncio.DatagramProtocol):
    def __init__(self, receive: Callable[[bytes, Any], None]):
        self._receive = receive
        self.closed = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self._receive(data, addr)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


class Relay:
    """`async with Relay.to(port, 0.05) as relay:` listens on `relay.port`.

    Each client address has a socket of its own towards the server, so that both sides find each
    other as without it.
    """

    def __init__(self, to: int, loss: float, seed: int):
        self._to, self._loss, self._random = to, loss, Random(seed)
        self.port = 0
        self.passed = self.lost = 0
        self._open: list[tuple[asyncio.DatagramTransport, _Socket]] = []
        self._back: dict[Any, asyncio.DatagramTransport] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int, loss: float, seed: int = 7) -> AsyncIterator[Relay]:
        relay = cls(port, loss, seed)
        front = await relay._socket(relay._from_client)
        relay.port = front.get_extra_info("sockname")[1]
        relay._front = front
        try:
            yield relay
        finally:
            await asyncio.gather(*relay._tasks)
            for transport, socket in relay._open:
                transport.close()
                await socket.closed

    async def _socket(self, receive: Callable[[bytes, Any], None]) -> asyncio.DatagramTransport:
        loop = asyncio.get_running_loop()
        made = await loop.create_datagram_endpoint(
            lambda: _Socket(receive), local_addr=(LOOPBACK, 0)
        )
        self._open.append(made)
        return made[0]

    def _from_client(self, data: bytes, addr: Any) -> None:
        if addr in self._back:
            if self._passes():
                self._back[addr].sendto(data, (LOOPBACK, self._to))
            return
        task = asyncio.ensure_future(self._admit(data, addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit(self, data: bytes, addr: Any) -> None:
        def to_client(answer: bytes, _: Any) -> None:
            if self._passes():
                self._front.sendto(answer, addr)

        self._back[addr] = await self._socket(to_client)
        self._back[addr].sendto(data, (LOOPBACK, self._to))

    def _passes(self) -> bool:
        lost = self._random.random() < self._loss
        self.lost += lost
        self.passed += not lost
        return not lost

    _front: asyncio.DatagramTransport
