"""Generate images in chats: detect which chats want them, and render them in the reply.

A client that offers the tool `image_generation` (or requests the modality "image") receives each
image in `images` of the message, in the format that gateways of several vendors share: {"type":
"image_url", "image_url": {"url": "data:…"}}. In a stream, it is sent as `delta.images` at its
position; text about it follows.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from motet_gateway.context import GatewayContext
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.render import ChatChoice, ChatChunks, Choice
from motet_gateway.openai.results import Collected
from motet_gateway.openai.schema import DRAWING, ChatBody
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.chat.vision import InputMedia
from motet_pipelines.images.chat_drawing import Drawing
from motet_pipelines.images.draw import ROLE
from motet_pipelines.images.imagine import imagine
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import MotetError
from motet_shared.messages import Chat, DenoisingProgress, Draw, Text

from .options import ImageOptions, ImageTool, check_options
from .schema import image_request

_MODALITIES = "modalities"
_OPTIONS = ImageOptions.__struct_fields__


@dataclass(frozen=True, slots=True)
class ChatImageGeneration:
    """Hold how the images of a chat are generated, and whether progress is reported."""

    request: Draw
    progress: bool
    where: str  # path of the options in the request, for errors

    @classmethod
    def of(
        cls, service: GatewayContext, body: ChatBody, request_id: str
    ) -> ChatImageGeneration | None:
        """Return the settings of a chat's images, or None if the chat has no image generation.

        Errors name the field of the tool in the request.
        """
        options, where = _image_tool(body)
        if options is None or body.tool_choice == "none":
            return None
        with _errors_at(where):
            check_options(options)
            model = model_of(service.bus.directory, ROLE, options.model)
            return cls(image_request(options, model, request_id), options.progress, where)


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Rewrite the parameter of errors in image options to its path in the chat request."""
    try:
        yield
    except MotetError as error:
        if error.param in _OPTIONS:
            error.param = f"{where}.{error.param}" if where != _MODALITIES else where
        raise


def _image_tool(body: ChatBody) -> tuple[ImageOptions | None, str]:
    """Return the image tool and its path in the request; (None, "") if there is none."""
    for index, tool in enumerate(body.tools or []):
        if isinstance(tool, ImageTool):
            return tool, f"tools[{index}]"
    return (ImageTool(), _MODALITIES) if body.modalities in DRAWING else (None, "")


async def chat_with_images(
    service: GatewayContext,
    store: BlobStore,
    generation: ChatImageGeneration,
    pictures: Sequence[InputMedia],
    accepts_images: bool,
    request: Chat,
    outcome: Outcome,
) -> AsyncGenerator[list[Any], None]:
    """Yield the events of a chat with images: lists of Text, of a DenoisingProgress, or of a Drawing."""
    config = service.config
    events = imagine(
        service.bus,
        store,
        request,
        generation.request,
        pictures,
        outcome,
        accepts_images=accepts_images,
        deadline=config.request_timeout,
        patience=config.patience,
    )
    with _errors_at(generation.where):
        async with aclosing(events):
            async for event in events:
                yield event if isinstance(event, list) else [event]


# ------------------------------------------------------------------------------------------------------------ streamed
class ImageChatChunks(ChatChunks):
    """Render the chunks of a chat with images."""

    def __init__(
        self,
        generation: ChatImageGeneration,
        response_id: str,
        created: int,
        model: str,
        **usage: Any,
    ):
        super().__init__(response_id, created, model, **usage)
        self.generation = generation

    def choice(self, index: int) -> Choice:
        return ImageChatChoice(self, index, self.generation)


class ImageChatChoice(ChatChoice):
    """Render the chunks of one choice with images.

    `partial_images` and `image_progress` of a delta are extensions; other clients see only
    `images`.
    """

    def __init__(self, chunks: ImageChatChunks, index: int, generation: ChatImageGeneration):
        super().__init__(chunks, index)
        self._generation = generation
        self._finished = self._preview_count = 0

    def batch(self, items: list[Any]) -> bytes:
        if not items or isinstance(items[0], Text):
            return super().batch(items)
        return self._open() + b"".join([self._image_delta(item) for item in items])

    def _image_delta(self, item: Drawing | DenoisingProgress) -> bytes:
        if isinstance(item, Drawing):
            entry = image_entry(item, self._generation.request.format, self._finished)
            self._finished, self._preview_count = self._finished + 1, 0
            return self._delta_chunk({"images": [entry]})
        delta: dict[str, Any] = {}
        if item.preview:
            preview = Drawing("", item.preview)
            shape = image_entry(preview, self._generation.request.format, self._finished)
            delta["partial_images"] = [{**shape, "partial_image_index": self._preview_count}]
            self._preview_count += 1
        if self._generation.progress:
            delta["image_progress"] = {
                "index": self._finished,
                "step": item.step,
                "steps": item.steps,
            }
        return self._delta_chunk(delta) if delta else b""

    def _delta_chunk(self, delta: dict[str, Any]) -> bytes:
        return self._chunks.chunk(self._delta(delta))


# --------------------------------------------------------------------------------------------------------------- whole
def collector_with_images(generation: ChatImageGeneration) -> type[Collected]:
    """Return the class that collects a choice with images."""

    class CollectedWithImages(Collected):
        def add(self, items: list[Any]) -> None:
            for item in items:
                if isinstance(item, Drawing):
                    self.images.append(
                        image_entry(item, generation.request.format, len(self.images))
                    )
            super().add([item for item in items if isinstance(item, Text)])

    return CollectedWithImages


def image_entry(drawing: Drawing, kind: str, index: int) -> dict[str, Any]:
    """Return an image as an entry of a message; `kind` is png, jpeg or webp."""
    url = f"data:image/{kind};base64,{base64.b64encode(drawing.data).decode()}"
    entry = {"type": "image_url", "image_url": {"url": url}, "index": index}
    return {**entry, "revised_prompt": drawing.prompt} if drawing.prompt else entry
