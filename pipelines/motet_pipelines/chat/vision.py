"""See: a question about pictures in, text out: encoder → chat.

    question = [{"type": "image"}, {"type": "text", "text": "What do you see?"}]
    messages = [{"role": "user", "content": question}]
    request = Chat(model="pocket-chat", messages=messages, sampling=Sampling())
    pictures = [InputMedia(Path("circles.png").read_bytes())]
    async with aclosing(see(bus, store, request, pictures)) as batches:
        async for batch in batches:  # list[Text], as of `chat`
            print("".join(item.text for item in batch), end="", flush=True)

Each {"type": "image"} in the messages stands for the next of the pictures. They lie in `store`
during the request; the tokenizer has them encoded by the encoder service, which caches a picture by
its content: one of an earlier turn costs nothing. If either service dies, another instance
continues. Leaving early is a remote cancel.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from motet_pipelines.voice.sound_files import Bytes
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import BlobRef, Chat, Image, Text
from motet_shared.wire.bus import Bus

from .chat import Outcome, chat

_READERS = 1 << 20  # no limit in practice: the file is dropped when the reply has ended
_TTL = 660.0  # seconds, where there is no deadline
_SPARE = 60.0  # seconds that a file is kept beyond the deadline


@dataclass(frozen=True, slots=True)
class InputMedia:
    """Picture, video or sound: a file in any format, and the resolution (of each frame)."""

    data: Bytes
    max_pixels: int = 0  # scale down to about this many; 0: as many as the model takes
    param: str = ""  # path in the client's request, which errors name
    is_video: bool = False
    is_audio: bool = False
    merged: tuple[Bytes, ...] = ()  # earlier pictures whose embeddings are merged with this one's


async def see(
    bus: Bus,
    store: BlobStore,
    request: Chat,
    pictures: Sequence[InputMedia],
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[list[Text], None]:
    """Yield the reply in batches; `deadline` and `patience` as in `chat`.

    Without pictures it is a chat.
    """
    async with lent_pictures(store, pictures, deadline) as images:
        asked = msgspec.structs.replace(request, images=images)
        async with aclosing(
            chat(bus, asked, outcome, deadline=deadline, patience=patience)
        ) as batches:
            async for batch in batches:
                yield batch


@asynccontextmanager
async def lent_pictures(
    store: BlobStore, pictures: Sequence[InputMedia], deadline: float | None = None
) -> AsyncIterator[list[Image]]:
    """Keep the pictures in `store` while in the block; yield their references for any chats.

    Equal files are stored once.
    """
    ttl = _TTL if deadline is None else deadline + _SPARE
    lent: dict[Bytes, BlobRef] = {}
    try:
        for file in (file for one in pictures for file in (one.data, *one.merged)):
            if file not in lent:
                lent[file] = await store.put_async(file, readers=_READERS, ttl=ttl)
        yield [
            Image(
                file=lent[one.data],
                max_pixels=one.max_pixels,
                param=one.param,
                is_video=one.is_video,
                is_audio=one.is_audio,
                merged=[lent[file] for file in one.merged],
            )
            for one in pictures
        ]
    finally:
        for ref in lent.values():
            store.drop(ref)
