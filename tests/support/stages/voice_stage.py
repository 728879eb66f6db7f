"""Run a real gateway and voice activity detection on nats-server, with scripted services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from support.clients.realtime_client import Client, talking
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.services.voice_services import ScriptedAsr, ScriptedTts


@dataclass
class Stage:
    """Hold the services; None for a role that does not run."""

    gateway: Gateway
    tokenizer: FakeTokenizer
    nats: NatsServer
    asr: ScriptedAsr | None = None
    tts: ScriptedTts | None = None
    vad: Vad | None = None

    def talk(self, **session: Any) -> AbstractAsyncContextManager[Client]:
        return talking(f"ws://127.0.0.1:{self.gateway.port}/v1/realtime?model={MODEL}", **session)


@asynccontextmanager
async def stage(*roles: str, **settings: Any) -> AsyncIterator[Stage]:
    """Run the language services and these roles, all ready.

    settings: of the gateway.
    """
    async with NatsServer() as nats, AsyncExitStack() as stack:
        buses = {role: await nats.bus(role) for role in ("tokenizer", "decode", "gateway", *roles)}
        config = GatewayConfig(port=0, drain_timeout=1.0, patience=1.0, **settings)
        tokenizer, gateway = (
            FakeTokenizer(None, buses["tokenizer"]),
            Gateway(config, buses["gateway"]),
        )
        made = Stage(gateway, tokenizer, nats)
        made.asr = ScriptedAsr(buses["asr"]) if "asr" in roles else None
        made.tts = ScriptedTts(buses["tts"]) if "tts" in roles else None
        made.vad = Vad(VadConfig(metrics_port=-1), buses["vad"]) if "vad" in roles else None
        actors = [
            tokenizer,
            FakeDecode(None, buses["decode"]),
            made.asr,
            made.tts,
            made.vad,
            gateway,
        ]
        for actor in actors:
            if actor is not None:
                await stack.enter_async_context(running(actor))
        wanted = ("tokenizer", "decode", *roles)
        await buses["gateway"].directory.wait_for(
            lambda d: all(d.ready(role) for role in wanted), 120
        )
        yield made
