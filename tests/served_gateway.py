"""A real gateway on a port of its own, in the test's process, and the official client of what it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from motet_gateway.config import GatewayConfig
from motet_gateway.gateway import Gateway
from motet_shared.testing import NatsServer, running

KEY = "sesame"


@dataclass
class Served:
    """Base of what a test has in its hands."""

    gateway: Gateway

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def client(self, key: str = KEY) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http)


@asynccontextmanager
async def served_gateway(nats: NatsServer, **settings: Any) -> AsyncIterator[Gateway]:
    """Without any services: what it knows of them is in `gateway.bus.directory`."""
    config = GatewayConfig(port=0, api_key=KEY, drain_timeout=5.0, **settings)
    async with running(Gateway(config, await nats.bus("gateway"))) as gateway:
        assert isinstance(gateway, Gateway)
        yield gateway
