"""Run the shipped chat model and a scripted tokenizer behind a real gateway, for protocol clients."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from motet_embedding.config import EmbeddingConfig
from motet_embedding.service import Embedding
from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.testing import NatsServer, running
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from recipes.world.pictures import draw_things
from recipes.world.scenes import Thing
from support.media.picture_files import encoded
from support.services.fake_services import FakeTokenizer, fake_services
from support.stages.served_gateway import Served, served_gateway

MODELS = Path(__file__).parents[3] / "models"
CHAT, EMBED = "pocket-chat", "pocket-embed"


@dataclass
class Stack:
    """The gateway, the decode service of the shipped model, and a scripted tokenizer."""

    served: Served
    decode: Decode
    scripted: FakeTokenizer


@asynccontextmanager
async def shipped_stack(*, embeds: bool = False) -> AsyncIterator[Stack]:
    """Run pocket-chat with its vision and a scripted model, and pocket-embed if `embeds`."""
    folder = str(MODELS / CHAT)
    quiet: dict[str, Any] = {"metrics_port": -1}
    decode = DecodeConfig(
        model=folder, name=CHAT, threads=1, num_blocks=400, block_size=16, **quiet
    )
    encoder = EncoderConfig(model=folder, name=CHAT, threads=1, **quiet)
    async with NatsServer() as nats, AsyncExitStack() as actors:
        engine = Decode(decode, await nats.bus("decode"))
        tokenizer = TokenizerConfig(model=(f"{CHAT}={folder}",), **quiet)
        made: list[Any] = [
            engine,
            Tokenizer(tokenizer, await nats.bus("tokenizer")),
            Encoder(encoder, await nats.bus("encoder")),
        ]
        if embeds:
            config = EmbeddingConfig(model=str(MODELS / EMBED), name=EMBED, threads=1, **quiet)
            made.append(Embedding(config, await nats.bus("embedding")))
        for actor in made:
            await actors.enter_async_context(running(actor))
        buses = await nats.bus("tokenizer"), await nats.bus("decode")
        for bus in buses:
            actors.push_async_callback(bus.close)
        scripted = await actors.enter_async_context(fake_services(*buses))
        gateway = await actors.enter_async_context(served_gateway(nats))
        needed = {"decode": 2, "tokenizer": 2, "encoder": 1, "embedding": int(embeds)}
        await gateway.bus.directory.wait_for(
            lambda d: all(len(d.ready(role)) == count for role, count in needed.items()), 60
        )
        yield Stack(Served(gateway), engine, scripted)


def red_circle() -> str:
    """Return a picture of the kind that pocket-chat has learned from, as base64 of a PNG."""
    one = Thing(shape="circle", colour="red", size="large", column=1, row=1)
    picture = encoded(Image.fromarray(draw_things([one], Random(5))))
    return base64.b64encode(picture).decode()
