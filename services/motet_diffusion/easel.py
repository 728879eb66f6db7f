"""One picture on its way to one caller: events of the engine into items, files made on threads of their own."""

from __future__ import annotations

import asyncio

from PIL.Image import Image
from torch import Tensor

from motet_shared.blobs import BlobStore
from motet_shared.call import Call
from motet_shared.errors import Overloaded
from motet_shared.messages import Checkpoint, Draw, Picture, Stroke
from motet_shared.pictures import to_file

from .drawing import Drawing, Event, Step
from .estimate import Colours

_INLINE = 1 << 20  # bytes of a checkpoint that travels in its item
_PREVIEW_SIDE = 768  # pixels: with a checkpoint beside it, a larger one might be more than a message can hold
_ROOM = 5.0  # seconds that a picture waits for room among those that are on their way


class Easel:
    """What there is to tell of one call's picture."""

    def __init__(self, call: Call, request: Draw, drawing: Drawing, colours: Colours, store: BlobStore):
        self._call, self._request, self._drawing = call, request, drawing
        self._colours, self._store = colours, store

    async def take(self, event: Event) -> bool:
        """Tell it. Whether that was all; raises what went wrong with the picture."""
        if isinstance(event, Step):
            await self._step(event)
            return False
        if event.error is not None:
            raise event.error
        if event.picture is not None:
            await self._show(event.picture, event.steps)
        return True

    async def _step(self, step: Step) -> None:
        """One credit is kept for the picture. What the caller has no room for is left out: it would come late."""
        if self._call.credit_left < 2:
            return
        preview = b""
        if step.estimate is not None:
            preview = await asyncio.to_thread(self._sketch, step.estimate)
        checkpoint = await self._checkpoint(step) if step.checkpoint else None
        if self._call.credit_left >= 2:
            self._call.push(Stroke(step.step, step.steps, preview, checkpoint))

    def _sketch(self, latents: Tensor) -> bytes:
        width, height = self._drawing.width, self._drawing.height
        scale = min(_PREVIEW_SIDE / max(width, height), 1.0)
        return self._file(self._colours.picture(latents, (max(int(width * scale), 1), max(int(height * scale), 1))))

    async def _checkpoint(self, step: Step) -> Checkpoint | None:
        if len(step.checkpoint) <= _INLINE:
            return Checkpoint(step.step, step.checkpoint)
        try:
            return Checkpoint(step.step, ref=await self._store.put_async(step.checkpoint, readers=[self._call.caller]))
        except Overloaded:  # the picture can do without
            return None

    async def _show(self, picture: Image, steps: int) -> None:
        data = await asyncio.to_thread(self._file, picture)
        ref = await self._store.put_async(data, readers=[self._call.caller], wait=_ROOM)
        await self._call.send(Picture(ref, *picture.size, steps))

    def _file(self, picture: Image) -> bytes:
        return to_file(picture, self._request.format, self._request.quality)
