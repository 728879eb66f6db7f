"""Images in a chat: from the URLs in its messages to files in the blob store, which the vision service reads.

    async with lent_images(service, body) as images:
        requests = [replace(request, images=images) for request in requests]

Only what a URL is worth is decided here; what is in the file, the vision service finds out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from motet_shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import BlobRef, Image

from .config import GatewayConfig
from .remote import fetch
from .schema import ChatBody, ImagePart, ImageUrl, UserMessage
from .service import Service

LOW_DETAIL = 512 * 512  # pixels
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_INLINE = 256 << 10  # characters that are decoded on the event loop
_READERS = 1 << 20  # nobody counts them: the file is dropped when the reply has ended


@dataclass(frozen=True, slots=True)
class Source:
    """An image as the client sent it. `param`: where it stands in the request."""

    param: str
    image: ImageUrl

    def max_pixels(self, config: GatewayConfig) -> int:
        """0: as many as the model takes."""
        if self.image.max_pixels is not None:
            return self.image.max_pixels
        return {"low": LOW_DETAIL, "high": 0}.get(self.image.detail or "auto", config.image_pixels)


def sources(body: ChatBody) -> list[Source]:
    """The images of a chat, in the order of its parts."""
    return list(_sources(body))


def _sources(body: ChatBody) -> Iterator[Source]:
    for number, message in enumerate(body.messages):
        if isinstance(message, UserMessage) and not isinstance(message.content, str):
            for index, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield Source(f"messages[{number}].content[{index}].image_url", part.image_url)


@asynccontextmanager
async def lent_images(service: Service, body: ChatBody) -> AsyncIterator[list[Image]]:
    """The chat's images in the gateway's blob store, while in the block. Equal files are there once."""
    given = sources(body)
    if not given:
        yield []
        return
    _check_model(service, body.model, given[0])
    store = await service.uploads()
    lent: dict[bytes, BlobRef] = {}
    images = []
    try:
        for source in given:
            data = await _read(source, service.config)
            if data not in lent:
                lent[data] = await store.put_async(data, readers=_READERS, ttl=service.config.request_timeout + 60)
            images.append(Image(file=lent[data], max_pixels=source.max_pixels(service.config), param=source.param))
        yield images
    finally:
        for ref in lent.values():
            store.drop(ref)


def _check_model(service: Service, model: str, first: Source) -> None:
    cards = [card for beat in service.bus.directory.ready("tokenizer") for card in beat.models if card.name == model]
    if cards and not any(card.images for card in cards):
        raise UnsupportedParameter(f"`{first.param}`: model {model!r} reads no images; send text", param=first.param)


async def _read(source: Source, config: GatewayConfig) -> bytes:
    url, param = source.image.url, f"{source.param}.url"
    if url[:5].lower() == "data:":
        if len(url) <= _INLINE:
            return _decoded(url, param, config.max_image)
        return await asyncio.to_thread(_decoded, url, param, config.max_image)
    if not re.match("https?://", url, re.IGNORECASE):
        raise BadRequest(f"`{param}`: {url[:40]!r} is no URL of an image; send data:image/png;base64,…", param=param)
    if not config.remote_images:
        message = f"`{param}`: this server fetches nothing (--remote-images allows it); send data:image/png;base64,…"
        raise UnsupportedParameter(message, param=param)
    return await fetch(url, param, most=config.max_image, seconds=config.image_timeout)


def _decoded(url: str, param: str, most: int) -> bytes:
    """The bytes of a data URI."""
    head = _DATA.match(url)
    if head is None or not head["type"].lower().startswith("image/") or ";base64" not in head["options"].lower():
        shown = url.partition(",")[0][:60]
        raise BadRequest(f"`{param}`: begins with {shown!r}; send data:image/png;base64,…", param=param)
    if (len(url) - head.end()) * 3 // 4 > most + 2:
        raise PayloadTooLarge(f"`{param}`: the image has more than {most} bytes (--max-image)", param=param)
    try:
        data = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadRequest(f"`{param}`: is no base64 ({error}); encode the file anew", param=param) from None
    if not data:
        raise BadRequest(f"`{param}`: is empty; send a picture", param=param)
    return data
