"""Read the images and recordings of a chat from its messages, for the encoder service.

Of an image only the URL is checked here; the encoder service decodes and checks the file.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from motet_gateway.config import GatewayConfig
from motet_gateway.context import GatewayContext
from motet_gateway.http.remote import fetch
from motet_pipelines.chat.models import accepts_audio
from motet_pipelines.chat.vision import InputMedia, lent_pictures
from motet_shared.errors import BadRequest, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import Image

from .schema import (
    AssistantMessage,
    AudioPart,
    ChatBody,
    ImagePart,
    ImageUrl,
    InputAudio,
    UserMessage,
    VideoPart,
)

LOW_DETAIL = 512 * 512  # pixels
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_EXAMPLES = {False: "data:image/png;base64,…", True: "data:video/mp4;base64,…"}
_INLINE = 256 << 10  # characters; longer data URIs are decoded in a thread


@dataclass(frozen=True, slots=True)
class Source:
    """An image as the client sent it; `param` is its path in the request."""

    param: str
    image: ImageUrl
    is_video: bool = False
    is_url: bool = False  # `param` is the path of the URL itself, not of an object with a URL

    @property
    def url_param(self) -> str:
        """Return the path of the URL in the request, for errors."""
        return self.param if self.is_url else f"{self.param}.url"

    def max_pixels(self, config: GatewayConfig) -> int:
        """Return the most pixels of the image; 0: as many as the model accepts."""
        if self.image.max_pixels is not None:
            return self.image.max_pixels
        return {"low": LOW_DETAIL, "high": 0}.get(self.image.detail or "auto", config.image_pixels)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording as the client sent it; `param` is its path in the request."""

    param: str
    audio: InputAudio


def sources(body: ChatBody, *, accepts_images: bool) -> list[Source | Recording]:
    """Return the images and recordings of a chat in the order of its parts.

    Images of earlier replies are included only with `accepts_images`.
    """
    return list(_sources(body, accepts_images))


def _sources(body: ChatBody, accepts_images: bool) -> Iterator[Source | Recording]:
    for number, message in enumerate(body.messages):
        if isinstance(message, UserMessage) and not isinstance(message.content, str):
            for index, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield Source(f"messages[{number}].content[{index}].image_url", part.image_url)
                elif isinstance(part, VideoPart):
                    yield Source(
                        f"messages[{number}].content[{index}].video_url",
                        part.video_url,
                        is_video=True,
                    )
                elif isinstance(part, AudioPart):
                    yield Recording(
                        f"messages[{number}].content[{index}].input_audio", part.input_audio
                    )
        elif isinstance(message, AssistantMessage) and accepts_images:
            for index, image in enumerate(message.images or []):
                yield Source(f"messages[{number}].images[{index}].image_url", image.image_url)


async def read_images(
    service: GatewayContext, body: ChatBody, *, accepts_images: bool
) -> list[InputMedia]:
    """Read the images and recordings of a chat.

    Raises UnsupportedParameter if the model does not accept them, BadRequest if a URL is not of an
    image or data is no base64.
    """
    given = sources(body, accepts_images=accepts_images)
    hears = accepts_audio(service.bus.directory, body.model)
    for source in given:
        is_audio = isinstance(source, Recording)
        if not (hears if is_audio else accepts_images):
            kind, param = "sound" if is_audio else "images", source.param
            raise UnsupportedParameter(
                f"`{param}`: model {body.model!r} does not accept {kind}; send text only",
                param=param,
            )
    return [await _read(source, service.config) for source in given]


async def _read(source: Source | Recording, config: GatewayConfig) -> InputMedia:
    if isinstance(source, Recording):
        return InputMedia(await read_recording(source, config), param=source.param, is_audio=True)
    return InputMedia(
        await read_image(source, config),
        source.max_pixels(config),
        source.param,
        source.is_video,
    )


async def leased_images(
    service: GatewayContext, pictures: list[InputMedia]
) -> AbstractAsyncContextManager[list[Image]]:
    """Return a context manager that leases the images to the services for a chat's duration."""
    if not pictures:
        return nullcontext([])
    return lent_pictures(await service.uploads(), pictures, service.config.request_timeout)


async def read_image(source: Source, config: GatewayConfig) -> bytes:
    """Return the file at a data URI or http(s) URL.

    Raises BadRequest, PayloadTooLarge or UnsupportedParameter; all name the parameter.
    """
    url, param = source.image.url, source.url_param
    example, what = _EXAMPLES[source.is_video], "a video" if source.is_video else "an image"
    if url[:5].lower() == "data:":
        if len(url) <= _INLINE:
            return _decoded(url, param, config.max_image, example)
        return await asyncio.to_thread(_decoded, url, param, config.max_image, example)
    if not re.match("https?://", url, re.IGNORECASE):
        raise BadRequest(
            f"`{param}`: {url[:40]!r} is not a URL of {what}; send {example}", param=param
        )
    if not config.remote_images:
        message = f"`{param}`: this server does not fetch URLs (enable it with --remote-images); send {example}"
        raise UnsupportedParameter(message, param=param)
    return await fetch(url, param, most=config.max_image, seconds=config.image_timeout)


def _decoded(url: str, param: str, most: int, example: str) -> bytes:
    """Return the bytes of a base64 data URI whose media type must match that of `example`.

    Raises BadRequest if it is malformed or empty, PayloadTooLarge beyond `most` bytes.
    """
    head = _DATA.match(url)
    if (
        head is None
        or not head["type"].lower().startswith(example[5:11])
        or ";base64" not in head["options"].lower()
    ):
        shown = url.partition(",")[0][:60]
        raise BadRequest(
            f"`{param}`: {shown!r} is not a supported data URI; send {example}", param=param
        )
    return _file(url[head.end() :], param, most, "--max-image", example)


def _file(text: str, param: str, most: int, flag: str, example: str) -> bytes:
    """Return the file that is sent as base64.

    Raises PayloadTooLarge above `most` bytes, which `flag` sets, and BadRequest for what is empty
    or no base64.
    """
    if len(text) * 3 // 4 > most + 2:
        raise PayloadTooLarge(
            f"`{param}`: the file has more than {most} bytes ({flag})", param=param
        )
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise BadRequest(
            f"`{param}`: invalid base64 ({error}); encode the file again", param=param
        ) from None
    if not data:
        raise BadRequest(f"`{param}`: the file is empty; send {example}", param=param)
    return data


async def read_recording(source: Recording, config: GatewayConfig) -> bytes:
    """Return the file of a recording.

    Raises BadRequest for data that is empty or no base64, PayloadTooLarge for a large file.
    """
    text, example = source.audio.data, f"a {source.audio.format}"
    given = (text, f"{source.param}.data", config.max_upload, "--max-upload", example)
    if len(text) <= _INLINE:
        return _file(*given)
    return await asyncio.to_thread(_file, *given)
