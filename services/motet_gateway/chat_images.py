"""Images in a chat: from the URLs in its messages to files, which the pipeline shows to the model.

Only what a URL is worth is decided here; what is in the file, the vision service finds out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass

from motet_pipelines.see import Shown
from motet_shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter

from .config import GatewayConfig
from .remote import fetch
from .schema import AssistantMessage, ChatBody, ImagePart, ImageUrl, UserMessage, VideoPart
from .service import Service

LOW_DETAIL = 512 * 512  # pixels
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_EXAMPLES = {False: "data:image/png;base64,…", True: "data:video/mp4;base64,…"}
_INLINE = 256 << 10  # characters that are decoded on the event loop


@dataclass(frozen=True, slots=True)
class Source:
    """An image as the client sent it. `param`: where it stands in the request."""

    param: str
    image: ImageUrl
    is_video: bool = False

    def max_pixels(self, config: GatewayConfig) -> int:
        """0: as many as the model takes."""
        if self.image.max_pixels is not None:
            return self.image.max_pixels
        return {"low": LOW_DETAIL, "high": 0}.get(self.image.detail or "auto", config.image_pixels)


def sources(body: ChatBody, *, sees: bool) -> list[Source]:
    """The images of a chat, in the order of its parts; those of earlier replies only where the model `sees` them."""
    return list(_sources(body, sees))


def _sources(body: ChatBody, sees: bool) -> Iterator[Source]:
    for number, message in enumerate(body.messages):
        if isinstance(message, UserMessage) and not isinstance(message.content, str):
            for index, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield Source(f"messages[{number}].content[{index}].image_url", part.image_url)
                elif isinstance(part, VideoPart):
                    yield Source(f"messages[{number}].content[{index}].video_url", part.video_url, is_video=True)
        elif isinstance(message, AssistantMessage) and sees:
            for index, image in enumerate(message.images or []):
                yield Source(f"messages[{number}].images[{index}].image_url", image.image_url)


async def given_pictures(service: Service, body: ChatBody, *, sees: bool) -> list[Shown]:
    """The chat's images, read. UnsupportedParameter for a model that does not see; BadRequest for what is no image."""
    given = sources(body, sees=sees)
    if given and not sees:
        param = given[0].param
        raise UnsupportedParameter(f"`{param}`: model {body.model!r} reads no images; send text", param=param)
    config = service.config
    return [
        Shown(await _read(source, config), source.max_pixels(config), source.param, source.is_video) for source in given
    ]


async def _read(source: Source, config: GatewayConfig) -> bytes:
    url, param = source.image.url, f"{source.param}.url"
    example, what = _EXAMPLES[source.is_video], "a video" if source.is_video else "an image"
    if url[:5].lower() == "data:":
        if len(url) <= _INLINE:
            return _decoded(url, param, config.max_image, example)
        return await asyncio.to_thread(_decoded, url, param, config.max_image, example)
    if not re.match("https?://", url, re.IGNORECASE):
        raise BadRequest(f"`{param}`: {url[:40]!r} is no URL of {what}; send {example}", param=param)
    if not config.remote_images:
        message = f"`{param}`: this server fetches nothing (--remote-images allows it); send {example}"
        raise UnsupportedParameter(message, param=param)
    return await fetch(url, param, most=config.max_image, seconds=config.image_timeout)


def _decoded(url: str, param: str, most: int, example: str) -> bytes:
    """The bytes of a data URI, which is to be like `example`."""
    head = _DATA.match(url)
    if head is None or not head["type"].lower().startswith(example[5:11]) or ";base64" not in head["options"].lower():
        shown = url.partition(",")[0][:60]
        raise BadRequest(f"`{param}`: begins with {shown!r}; send {example}", param=param)
    if (len(url) - head.end()) * 3 // 4 > most + 2:
        raise PayloadTooLarge(f"`{param}`: the file has more than {most} bytes (--max-image)", param=param)
    try:
        data = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadRequest(f"`{param}`: is no base64 ({error}); encode the file anew", param=param) from None
    if not data:
        raise BadRequest(f"`{param}`: is empty; send {example}", param=param)
    return data
