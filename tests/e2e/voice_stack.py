"""The gateway and the voice activity service as processes, and behind them services whose words a test chooses.

What is said and heard must mean something for a conversation to go on; a tiny model with random weights says nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx

from e2e.stack import START_SECONDS, fetch, until
from motet_shared.messages import ModelCard
from motet_shared.process.actor import Actor
from motet_shared.testing import NatsServer, free_port, running
from support.running.service_process import service_process
from support.services.fake_services import MODEL, FakeDecode, FakeEncoder, FakeTokenizer
from support.services.voice_services import ScriptedAsr, ScriptedTts


@dataclass
class VoiceStack:
    """A running gateway, and what stands behind it."""

    nats: NatsServer
    port: int
    tokenizer: FakeTokenizer
    asr: ScriptedAsr
    tts: ScriptedTts


@asynccontextmanager
async def voice_stack(
    ears: type[ScriptedAsr] = ScriptedAsr, *, hearing: bool = False
) -> AsyncIterator[VoiceStack]:
    """Ready for speech when entered; its processes have ended when left.

    hearing: the model hears, and no recognizer runs.
    """
    async with NatsServer() as nats, AsyncExitStack() as stack:
        port = free_port()
        await stack.enter_async_context(service_process(nats, "motet_gateway", "--port", str(port)))
        await stack.enter_async_context(service_process(nats, "motet_vad"))
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        asr, tts = ears(await nats.bus("asr")), ScriptedTts(await nats.bus("tts"))
        actors: list[Actor] = [tokenizer, FakeDecode(None, await nats.bus("decode")), tts]
        if hearing:
            tokenizer.card = ModelCard(name=MODEL, context=4096, audio=True)
            actors.append(FakeEncoder(None, await nats.bus("encoder")))
        else:
            actors.append(asr)
        for actor in actors:
            await stack.enter_async_context(running(actor))
        await asyncio.to_thread(
            until, lambda: _complete(port), "the gateway hears and speaks", START_SECONDS
        )
        yield VoiceStack(nats, port, tokenizer, asr, tts)


def _complete(port: int) -> bool:
    """Whether the gateway knows of them all."""
    try:
        reply = fetch(f"http://127.0.0.1:{port}/health/ready", model=MODEL)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200 and not reply.json()["speech"]["missing"]
