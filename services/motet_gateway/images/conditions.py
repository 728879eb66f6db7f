"""Define the images that steer a picture: those of ControlNets, and prompts of IP-Adapters."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from motet_gateway.http.fields import Strict
from motet_shared.errors import BadRequest, PayloadTooLarge

_DATA_URL = "data:"
Base64 = Annotated[str, Meta(min_length=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class ControlBody(Strict, kw_only=True):
    """A ControlNet that the server was started with, and the image that it follows.

    `image`: a file as base64 or a data URL. `start` and `end`: the part of the steps.
    """

    name: Name
    image: Base64
    scale: Annotated[float, Meta(ge=0, le=10)] = 1.0
    start: Fraction = 0.0
    end: Fraction = 1.0


class IPAdapterBody(Strict, kw_only=True):
    """An IP-Adapter that the server was started with, and the image that it reads as a prompt."""

    name: Name
    image: Base64
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


Controls = Annotated[list[ControlBody], Meta(max_length=4)]
IPAdapters = Annotated[list[IPAdapterBody], Meta(max_length=4)]


def image_files(
    field: str, bodies: Sequence[ControlBody | IPAdapterBody] | None, most: int
) -> list[bytes]:
    """Return the images' files.

    Raises BadRequest for what is no base64, PayloadTooLarge for more than `most` bytes.
    """
    return [
        file_of(body.image, f"{field}[{number}].image", most)
        for number, body in enumerate(bodies or [])
    ]


def file_of(text: str, param: str, most: int) -> bytes:
    """Return a file that is sent as base64 or as a data URL. Raises like `image_files`."""
    if text.startswith(_DATA_URL):
        text = text.partition(",")[2]
    if len(text) * 3 // 4 > most + 2:
        message = f"`{param}`: the file has more than {most} bytes (--max-image)"
        raise PayloadTooLarge(message, param=param)
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except ValueError:  # of base64 and of characters beyond ASCII
        message = f"`{param}` is no base64; send an image file as base64, or its data URL"
        raise BadRequest(message, param=param) from None
    if not data:
        raise BadRequest(f"`{param}`: the file is empty; send an image", param=param)
    return data
