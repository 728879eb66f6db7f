"""Run real encoder, tokenizer and decode services for chats with pictures."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image as Pil

from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Chat, Encode, EncodedImage, End, Image, Sampling, Text
from motet_shared.process.actor import Actor
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints.vlm_checkpoints import picture

MODEL = "eyes"


def png(shown: Pil.Image) -> bytes:
    file = io.BytesIO()
    shown.save(file, "PNG")
    return file.getvalue()


@dataclass
class Reply:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    end: End = field(default_factory=lambda: End(0, 0))


class Stage:
    """Hold the gateway's bus and the services.

    store: the gateway's, whose files are read by reference.
    """

    def __init__(
        self, hub: MemoryHub, stack: AsyncExitStack, folder: Path, gateway: Bus, store: BlobStore
    ):
        self.hub, self.folder, self.gateway, self.store = hub, folder, gateway, store
        self.actors: list[Actor] = []
        self._stack = stack

    async def start(self, actor: Any) -> Any:
        await self._stack.enter_async_context(running(actor))
        await settle()
        self.actors.append(actor)
        return actor

    async def encoder(self, **settings: Any) -> Encoder:
        config = EncoderConfig(
            model=str(self.folder), name=MODEL, threads=1, **{"cache_memory": 4 << 20, **settings}
        )
        encoder: Encoder = await self.start(Encoder(config, await memory_bus(self.hub, "encoder")))
        return encoder

    async def decode(self, kind: type[Decode] = Decode, **settings: Any) -> Decode:
        options = {
            "num_blocks": 200,
            "block_size": 8,
            "token_budget": 64,
            "max_running": 8,
            **settings,
        }
        config = DecodeConfig(
            model=str(self.folder), name=MODEL, threads=1, metrics_port=-1, **options
        )
        decode: Decode = await self.start(kind(config, await memory_bus(self.hub, "decode")))
        return decode

    async def tokenizer(self, **settings: Any) -> Tokenizer:
        config = TokenizerConfig(
            model=(f"{MODEL}={self.folder}",), **{"decode_wait": 3.0, **settings}
        )
        tokenizer: Tokenizer = await self.start(
            Tokenizer(config, await memory_bus(self.hub, "tokenizer"))
        )
        return tokenizer

    def file(self, data: bytes, **fields: Any) -> Image:
        return Image(file=self.store.put(data, readers=1 << 20, ttl=600), **fields)

    def pictures(self, *numbers: int, **fields: Any) -> list[Image]:
        return [self.file(png(picture(number)), **fields) for number in numbers]

    async def see(self, image: Image, model: str = MODEL) -> EncodedImage:
        async with self.gateway.open("encoder", Encode(model=model, image=image)) as stream:
            async for item in stream:
                assert isinstance(item, EncodedImage)
                return item
        raise AssertionError("the stream ended without a word")

    async def ask(
        self, content: Any, images: list[Image], max_tokens: int = 8, **fields: Any
    ) -> Reply:
        """Return the reply to a user's `content`."""
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        more = fields.pop("sampling_fields", {})
        sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=max_tokens, **more)
        request = Chat(
            model=MODEL,
            messages=messages,
            images=images,
            sampling=sampling,
            max_tokens=max_tokens,
            **fields,
        )
        reply = Reply()
        async with self.gateway.open("tokenizer", request) as stream:
            async for item in stream:
                assert isinstance(item, Text)
                reply.text += item.text
                reply.ids += item.ids
        reply.end = stream.end or reply.end
        return reply

    async def idle(self) -> None:
        """Require that no state is left in any live actor."""
        async with asyncio.timeout(20):
            while any(actor.bus.calls.active for actor in self.actors):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for actor in self.actors:
            actor.check_integrity()


@asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """Run a stage on an in-memory hub and require that no state is left at its end.

    folder: of a vision-language checkpoint.
    """
    hub = MemoryHub()
    async with AsyncExitStack() as stack:
        gateway = await memory_bus(hub, "gateway")
        stack.push_async_callback(gateway.close)
        store = await stack.enter_async_context(BlobStore(gateway.instance, 16 << 20))
        made = Stage(hub, stack, folder, gateway, store)
        yield made
        await made.idle()
