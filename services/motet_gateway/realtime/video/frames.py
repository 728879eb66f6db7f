"""Read the frames of a camera that a client sends, as events of their own or as items."""

from __future__ import annotations

from motet_gateway.config import GatewayConfig
from motet_gateway.openai.chat_images import read_image
from motet_gateway.realtime.events import ClientItem, MessageItem
from motet_gateway.realtime.pictures import source_of
from motet_pipelines.chat.models import accepts_images
from motet_pipelines.voice.conversation.frames import Frame
from motet_pipelines.voice.conversation.history import IMAGE
from motet_shared.errors import UnsupportedParameter
from motet_shared.wire.discovery import Directory


def check_video(directory: Directory, model: str, param: str) -> None:
    """Raise UnsupportedParameter if the session's model reads no images."""
    if not model or not accepts_images(directory, model):
        reader = f"model {model!r}" if model else "a transcription session"
        raise UnsupportedParameter(f"`{param}`: {reader} reads no images; omit it", param=param)


def is_frame(item: ClientItem) -> bool:
    """Return True for a user's item of nothing but images: frames, in a session with `video`."""
    return (
        isinstance(item, MessageItem)
        and item.role == "user"
        and bool(item.content)
        and all(part.type == IMAGE for part in item.content)
    )


async def frames_of(item: ClientItem, config: GatewayConfig) -> tuple[Frame, ...]:
    """Return the images of an item that was checked."""
    if not isinstance(item, MessageItem):
        return ()
    return tuple(
        [
            await read_frame(part.image_url or "", part.detail, f"item.content[{index}]", config)
            for index, part in enumerate(item.content)
        ]
    )


async def read_frame(data: str, detail: str | None, param: str, config: GatewayConfig) -> Frame:
    """Return a frame, from a data URL or base64 alone.

    Raises BadRequest for what is empty or no base64, PayloadTooLarge above `--max-image`.
    """
    url = data if data[:5].lower() == "data:" else f"data:image/*;base64,{data}"
    source = source_of(url, detail, param)
    return Frame(await read_image(source, config), source.max_pixels(config))
