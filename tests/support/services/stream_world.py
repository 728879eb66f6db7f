"""Run the two ends of streams under a fake clock, for tests of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from motet_shared import errors
from motet_shared.messages import Echo, Text, Usage
from motet_shared.process.actor import Actor, operation
from motet_shared.testing import FakeClock, MemoryHub, memory_bus, settle
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.stream import Stream
from motet_shared.wire.transport import Message


class EchoWorker(Actor):
    """Send `count` items; `served` lists started streams, `ended` how each ended."""

    role = "tokenizer"

    def __init__(self, bus: Bus):
        super().__init__(None, bus)
        self.served: list[str] = []
        self.ended: list[str] = []

    @operation(Echo)
    async def echo(self, call: Call, request: Echo) -> None:
        self.served.append(call.id)
        try:
            for number in range(request.count):
                if number == request.fail_at:
                    raise errors.ContextTooLong("too long: 9 of 8 tokens", param="messages")
                if request.delay_ms:
                    await self.bus.clock.sleep(request.delay_ms / 1000)
                await call.send(Text(request.text, [number]))
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("complete")
        call.finish("length", Usage(prompt_tokens=request.count))


class World:
    """Run a hub under a fake clock, a gateway that calls, and workers that answer."""

    def __init__(self, hub: MemoryHub, clock: FakeClock):
        self.hub, self.clock = hub, clock
        self.buses: list[Bus] = []

    async def gateway(self) -> Bus:
        return await self._bus("gateway")

    async def echo_worker(self, max_active: int = 64) -> EchoWorker:
        echo_worker = EchoWorker(await self._bus("tokenizer"))
        echo_worker.max_active = max_active
        await echo_worker.start()
        await settle()
        return echo_worker

    async def close(self) -> None:
        for bus in self.buses:
            await bus.close()

    async def _bus(self, role: str) -> Bus:
        bus = await memory_bus(self.hub, role, self.clock)
        self.buses.append(bus)
        await settle()
        return bus


async def ids(stream: Stream) -> list[int]:
    """Return all token ids of a stream, in order."""
    found: list[int] = []
    async with stream:
        async for body in stream:
            assert isinstance(body, Text)
            found += body.ids
    return found


class LoseOnce:
    """Lose the first message for which `when` holds."""

    def __init__(self, when: Callable[[Message], bool]):
        self.when, self.lost = when, 0

    def __call__(self, message: Message) -> bool:
        if not self.lost and self.when(message):
            self.lost += 1
            return True
        return False
