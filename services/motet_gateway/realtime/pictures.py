"""Handle images in a conversation: `input_image` parts of user items, as data URLs.

They are checked when their item is created, kept with it unchanged, and lent to the model with each
response, as the sound of the user is that a model hears. The encoder service decodes the files.
"""

from __future__ import annotations

from typing import Any

from motet_gateway.config import GatewayConfig
from motet_gateway.openai.chat_images import Source, read_image
from motet_gateway.openai.schema import ImageUrl
from motet_pipelines.chat.models import accepts_images
from motet_pipelines.chat.vision import InputMedia
from motet_pipelines.voice.conversation.frames import FRAMES
from motet_pipelines.voice.conversation.history import IMAGE, Item, without_sound
from motet_pipelines.voice.conversation.user_sound import media_of
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.wire.discovery import Directory

from .events import ClientItem, ContentPart, MessageItem

_DETAILS = ("auto", "low", "high")


async def check_pictures(
    item: ClientItem, where: str, directory: Directory, model: str, config: GatewayConfig
) -> None:
    """Check the images of an item, naming the part in errors.

    Raises UnsupportedParameter if the session's model reads no images, BadRequest or
    PayloadTooLarge for parts that are no valid images.
    """
    if not isinstance(item, MessageItem):
        return
    for index, part in enumerate(item.content):
        if part.type != IMAGE:
            continue
        param = f"{where}.content[{index}]"
        if item.role != "user":
            message = f"`{param}.type` is {IMAGE!r}, which a {item.role} message cannot have"
            raise BadRequest(message, param=f"{param}.type")
        if not model or not accepts_images(directory, model):
            reader = f"model {model!r}" if model else "a transcription session"
            raise UnsupportedParameter(
                f"`{param}`: {reader} reads no images; send text", param=param
            )
        await _check_part(part, param, config)


async def _check_part(part: ContentPart, param: str, config: GatewayConfig) -> None:
    if part.image_url is None:
        raise BadRequest(f"`{param}.image_url` is required", param=f"{param}.image_url")
    if part.detail not in (None, *_DETAILS):
        message = f"`{param}.detail` {part.detail[:40]!r} is not one of {', '.join(_DETAILS)}"
        raise BadRequest(message, param=f"{param}.detail")
    if part.image_url[:5].lower() != "data:":
        message = f"`{param}.image_url`: conversations take data URLs; send data:image/png;base64,…"
        raise UnsupportedParameter(message, param=f"{param}.image_url")
    await read_image(source_of(part.image_url, part.detail, f"{param}.image_url"), config)


def without_files(item: Item) -> Item:
    """Return an item as events show it, without images and sound: the client has the files."""
    item = without_sound(item)
    if not any(part["type"] == IMAGE for part in item.get("content", ())):
        return item
    return {
        **item,
        "content": [
            {k: v for k, v in part.items() if k != "image_url"} for part in item["content"]
        ],
    }


async def shown(
    messages: list[dict[str, Any]], config: GatewayConfig
) -> tuple[list[dict[str, Any]], list[InputMedia]]:
    """Return chat messages with placeholders for images and recordings, and these in their order."""
    media = [
        await _medium(part, config)
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] != "text"
    ]
    return with_placeholders(messages), media


def with_placeholders(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages whose images and recordings are replaced by their types."""
    return [
        {**message, "content": [_placeholder(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _placeholder(part: dict[str, Any]) -> dict[str, Any]:
    return part if part["type"] == "text" else {"type": part["type"]}


async def _medium(part: dict[str, Any], config: GatewayConfig) -> InputMedia:
    if part["type"] == "audio" or FRAMES in part:
        return media_of(part)
    source = source_of(part["image_url"], part["detail"], "conversation")
    return InputMedia(await read_image(source, config), source.max_pixels(config), source.param)


def source_of(url: str, detail: Any, param: str) -> Source:
    """Return an image by its URL, which `param` names in errors."""
    return Source(param, ImageUrl(url=url, detail=detail), is_url=True)
