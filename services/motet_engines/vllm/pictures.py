"""Decode pictures in confined child processes, and have vLLM put their tokens into a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from motet_engines.engine import Features
from motet_engines.pictures import Picture
from motet_shared.errors import ContextTooLong
from motet_shared.messages import Generate

if TYPE_CHECKING:
    from PIL import Image

_AT_A_TIME = 2  # requests whose pictures are decoded: they are large


class PictureInput:
    """Make vLLM's input of prompts with pictures; `engine` is an `AsyncLLM`.

    max_pixels: of the largest picture that is decoded.
    """

    def __init__(self, engine: Any, max_pixels: int):
        self._engine = engine
        self._max_pixels = max_pixels
        self._slots = asyncio.Semaphore(_AT_A_TIME)

    async def render(
        self, request: Generate, pictures: Sequence[Picture]
    ) -> tuple[dict[str, Any], Generate, int]:
        """Return the input, the request with the room that is left, and the tokens of the prompt.

        The input's `prompt_token_ids` have the tokens of the pictures in place of their marks.

        Raises BadRequest and PayloadTooLarge for pictures that cannot be decoded, ContextTooLong for
        a prompt that leaves no room for a reply.
        """
        async with self._slots:
            decoded = [await _decoded(picture, self._max_pixels) for picture in pictures]
            ids = [*request.prompt, *request.output]
            prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": decoded}}
            (found,) = await self._engine.renderer.render_cmpl_async([prompt])
        length = len(found["prompt_token_ids"]) - len(request.output)
        most = min(request.sampling.max_tokens, self._room(request, length))
        sampling = replace(request.sampling, max_tokens=most)
        return dict(found), replace(request, sampling=sampling), length

    def _room(self, request: Generate, length: int) -> int:
        context = int(self._engine.model_config.max_model_len)
        most = request.chat.max_context if request.chat is not None else 0
        limit = min(context, most) if most else context
        if length >= limit:
            raise ContextTooLong(
                f"the prompt has {length} tokens with its pictures, of {limit} for prompt and reply"
                " together; send fewer or smaller pictures",
                param="messages",
            )
        return limit - length


def picture_features(engine: Any, features: Features) -> Features | None:
    """Return what is supported for chats with pictures; None if the model or the release has none.

    features: of chats without.
    """
    if not getattr(engine.model_config, "is_multimodal_model", False):
        return None
    if not hasattr(getattr(engine, "renderer", None), "render_cmpl_async"):
        return None
    limits = engine.renderer.get_mm_processor().info.allowed_mm_limits
    return features if limits.get("image", 0) else None


async def _decoded(picture: Picture, max_pixels: int) -> Image.Image:
    """Return the picture in RGB, scaled down to its own `max_pixels`."""
    # Pillow is in vLLM's environment; the host in front of a server needs none.
    from motet_media.pictures import open_picture
    from motet_media.pool import decoding

    found = await decoding(open_picture, picture.file, max_pixels=max_pixels, param=picture.param)
    pixels = found.width * found.height
    if 0 < picture.max_pixels < pixels:
        scale = (picture.max_pixels / pixels) ** 0.5
        size = max(1, int(found.width * scale)), max(1, int(found.height * scale))
        found = await asyncio.to_thread(found.resize, size)
    return found
