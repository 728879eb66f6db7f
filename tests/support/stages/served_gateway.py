"""Run a real gateway on its own port, in the test's process, with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.process.actor import Actor
from motet_shared.testing import NatsServer, running
from motet_shared.wire.bus import Bus

KEY = "sesame"
Service = TypeVar("Service", bound=Actor)


@dataclass
class Served:
    """Hold the gateway and its client."""

    gateway: Gateway

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def client(self, key: str = KEY) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http
        )


@asynccontextmanager
async def served_gateway(nats: NatsServer, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway without services; `gateway.bus.directory` has what it knows."""
    config = GatewayConfig(port=0, api_key=KEY, drain_timeout=5.0, **settings)
    async with running(Gateway(config, await nats.bus("gateway", config.site))) as gateway:
        yield gateway


@asynccontextmanager
async def served(
    role: str, make: Callable[[Bus], Service], count: int = 1
) -> AsyncIterator[tuple[Gateway, list[Service]]]:
    """Run a gateway that has found `count` services of `role`, on their own NATS server."""
    async with NatsServer() as nats, AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(running(make(await nats.bus(role))))
            for _ in range(count)
        ]
        gateway = await stack.enter_async_context(served_gateway(nats))
        await gateway.bus.directory.wait_for(lambda d: len(d.ready(role)) == count, 10)
        yield gateway, services
