"""Define the image options that /v1/images and the image tool of chats share."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from motet_gateway.http.fields import Strict
from motet_shared.errors import UnsupportedParameter


class LoraBody(Strict, kw_only=True):
    """An adapter that the server was started with."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    scale: Annotated[float, Meta(ge=-10, le=10)] = 1.0


class ImageOptions(Strict, kw_only=True):
    """Options that generations, edits and the image tool share.

    `steps`, `scheduler`, `guidance_scale`, `negative_prompt`, `loras` and `progress` are extensions.
    """

    model: str = ""
    size: str | None = None
    quality: Literal["auto", "standard", "low", "medium", "high", "hd"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    partial_images: Annotated[int, Meta(ge=0, le=8)] | None = None
    steps: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    scheduler: Annotated[str, Meta(max_length=40)] = ""
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    negative_prompt: str = ""
    loras: Annotated[list[LoraBody], Meta(max_length=8)] | None = None
    progress: bool = False  # adds an event per step to OpenAI's


class ImageTool(ImageOptions, tag="image_generation", kw_only=True):
    """The image tool of a chat, with the fields of OpenAI's Responses API.

    The server generates the images that the model requests.
    """

    moderation: Literal["auto", "low"] | None = None


def check_options(options: ImageOptions) -> None:
    """Raise UnsupportedParameter for options that are valid but not supported here."""
    if options.background == "transparent":
        raise UnsupportedParameter(
            "`background` transparent is not supported; send opaque or auto", param="background"
        )
    if options.quality in ("low", "high", "hd"):
        message = f"`quality` {options.quality} is not supported; set `steps` instead"
        raise UnsupportedParameter(message, param="quality")
