"""See: a question about pictures in, text out: vision → chat.

    question = [{"type": "image"}, {"type": "text", "text": "What do you see?"}]
    request = Chat(model="pocket-chat", messages=[{"role": "user", "content": question}], sampling=Sampling())
    async with aclosing(see(bus, store, request, [Shown(Path("circles.png").read_bytes())])) as batches:
        async for batch in batches:  # list[Text], as of `chat`
            print("".join(item.text for item in batch), end="", flush=True)

Each {"type": "image"} in the messages stands for the next of the pictures. They lie in `store` while they are asked
about; the tokenizer has them encoded by the vision service, which knows a picture by its content: one that was seen in
an earlier turn costs nothing. Whichever service dies, another one goes on. Leaving early is a remote cancel.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.messages import BlobRef, Chat, Image, Text

from .chat import Outcome, chat
from .files import Bytes

_READERS = 1 << 20  # nobody counts them: the file is dropped when the reply has ended
_TTL = 660.0  # seconds, where there is no deadline
_SPARE = 60.0  # seconds beyond the deadline


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture or a video: a file in any format, and how much of it (of each frame) the model is to see."""

    data: Bytes
    max_pixels: int = 0  # it is scaled down to about so many; 0: as many as the model takes
    param: str = ""  # where it stands in the client's request, which errors name
    is_video: bool = False


async def see(
    bus: Bus,
    store: BlobStore,
    request: Chat,
    pictures: Sequence[Shown],
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[list[Text], None]:
    """Yield the reply in batches; `deadline` and `patience` are those of `chat`. Without pictures it is a chat."""
    async with lent_pictures(store, pictures, deadline) as images:
        asked = msgspec.structs.replace(request, images=images)
        async with aclosing(chat(bus, asked, outcome, deadline=deadline, patience=patience)) as batches:
            async for batch in batches:
                yield batch


@asynccontextmanager
async def lent_pictures(
    store: BlobStore, pictures: Sequence[Shown], deadline: float | None = None
) -> AsyncIterator[list[Image]]:
    """The pictures in `store`, for as many chats as there are in the block. Equal files are there once."""
    ttl = _TTL if deadline is None else deadline + _SPARE
    lent: dict[Bytes, BlobRef] = {}
    try:
        for picture in pictures:
            if picture.data not in lent:
                lent[picture.data] = await store.put_async(picture.data, readers=_READERS, ttl=ttl)
        yield [
            Image(file=lent[one.data], max_pixels=one.max_pixels, param=one.param, is_video=one.is_video)
            for one in pictures
        ]
    finally:
        for ref in lent.values():
            store.drop(ref)
