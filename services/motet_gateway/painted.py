"""Chats in which the server draws: which are, and how their pictures are told.

Whoever offers the tool `image_generation` (or asks for the modality "image") gets each picture as `images` of the
message, in the shape that gateways of several vendors share: {"type": "image_url", "image_url": {"url": "data:…"}}. In
a stream it comes as `delta.images` where it is made; the words about it follow.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from motet_pipelines.chat import Outcome
from motet_pipelines.draw import ROLE
from motet_pipelines.illustrated import Drawing
from motet_pipelines.imagine import imagine
from motet_pipelines.see import Shown
from motet_shared.blobs import BlobStore
from motet_shared.errors import MotetError
from motet_shared.messages import Chat, Draw, Stroke, Text

from .aliases import model_of
from .image_options import ImageOptions, ImageTool, check_options
from .images_schema import brush
from .render import ChatChoice, ChatChunks, Choice
from .results import Collected
from .schema import DRAWING, ChatBody
from .service import Service

_MODALITIES = "modalities"
_OPTIONS = ImageOptions.__struct_fields__


@dataclass(frozen=True, slots=True)
class Painting:
    """How the pictures of a chat are drawn, and what of their forming is told."""

    brush: Draw
    progress: bool
    where: str  # in the request it is said, for errors

    @classmethod
    def of(cls, service: Service, body: ChatBody, request_id: str) -> Painting | None:
        """None if none are to be drawn. Errors name the field of the tool."""
        options, where = _wanted(body)
        if options is None or body.tool_choice == "none":
            return None
        with _naming(where):
            check_options(options)
            model = model_of(service.bus.directory, ROLE, options.model)
            return cls(brush(options, model, request_id), options.progress, where)


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Errors of the options name their field in the chat."""
    try:
        yield
    except MotetError as error:
        if error.param in _OPTIONS:
            error.param = f"{where}.{error.param}" if where != _MODALITIES else where
        raise


def _wanted(body: ChatBody) -> tuple[ImageOptions | None, str]:
    """The tool, and its place in the request."""
    for index, tool in enumerate(body.tools or []):
        if isinstance(tool, ImageTool):
            return tool, f"tools[{index}]"
    return (ImageTool(), _MODALITIES) if body.modalities in DRAWING else (None, "")


async def painted(
    service: Service,
    store: BlobStore,
    painting: Painting,
    pictures: Sequence[Shown],
    sees: bool,
    request: Chat,
    outcome: Outcome,
) -> AsyncGenerator[list[Any], None]:
    """The events of a chat: lists of Text, of a Stroke, or of a Drawing."""
    config = service.config
    events = imagine(
        service.bus,
        store,
        request,
        painting.brush,
        pictures,
        outcome,
        sees=sees,
        deadline=config.request_timeout,
        patience=config.patience,
    )
    with _naming(painting.where):
        async with aclosing(events):
            async for event in events:
                yield event if isinstance(event, list) else [event]


# ------------------------------------------------------------------------------------------------------------ streamed
class PaintedChunks(ChatChunks):
    """Chunks of a chat with pictures."""

    def __init__(self, painting: Painting, response_id: str, created: int, model: str, include_usage: bool = False):
        super().__init__(response_id, created, model, include_usage)
        self.painting = painting

    def choice(self, index: int) -> Choice:
        return PaintedChoice(self, index, self.painting)


class PaintedChoice(ChatChoice):
    """`partial_images` and `image_progress` of a delta are ours; clients that do not know them see `images` alone."""

    def __init__(self, chunks: PaintedChunks, index: int, painting: Painting):
        super().__init__(chunks, index)
        self._painting = painting
        self._done = self._previews = 0

    def batch(self, items: list[Any]) -> bytes:
        if not items or isinstance(items[0], Text):
            return super().batch(items)
        return b"".join([self._pictured(item) for item in items])

    def _pictured(self, item: Drawing | Stroke) -> bytes:
        if isinstance(item, Drawing):
            entry = image_entry(item, self._painting.brush.format, self._done)
            self._done, self._previews = self._done + 1, 0
            return self._told({"images": [entry]})
        told: dict[str, Any] = {}
        if item.preview:
            preview = Drawing("", item.preview)
            shape = image_entry(preview, self._painting.brush.format, self._done)
            told["partial_images"] = [{**shape, "partial_image_index": self._previews}]
            self._previews += 1
        if self._painting.progress:
            told["image_progress"] = {"index": self._done, "step": item.step, "steps": item.steps}
        return self._told(told) if told else b""

    def _told(self, delta: dict[str, Any]) -> bytes:
        return self._chunks.chunk(self._delta(delta))


# --------------------------------------------------------------------------------------------------------------- whole
def collected(painting: Painting) -> type[Collected]:
    """What gathers a choice with pictures."""

    class PaintedCollected(Collected):
        def add(self, items: list[Any]) -> None:
            for item in items:
                if isinstance(item, Drawing):
                    self.images.append(image_entry(item, painting.brush.format, len(self.images)))
            super().add([item for item in items if isinstance(item, Text)])

    return PaintedCollected


def image_entry(drawing: Drawing, kind: str, index: int) -> dict[str, Any]:
    """A picture in a message. `kind`: png, jpeg or webp."""
    url = f"data:image/{kind};base64,{base64.b64encode(drawing.data).decode()}"
    entry = {"type": "image_url", "image_url": {"url": url}, "index": index}
    return {**entry, "revised_prompt": drawing.prompt} if drawing.prompt else entry
