"""Stream one picture to one caller: turn engine events into items, encode files in threads."""

from __future__ import annotations

import asyncio

from PIL.Image import Image
from torch import Tensor

from motet_diffusion.engine.request import Event, PictureRequest, StepDone
from motet_diffusion.pipeline.estimate import RGBPreview
from motet_media.pictures import to_file
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Overloaded
from motet_shared.messages import Checkpoint, DenoisingProgress, Draw, Picture
from motet_shared.wire.call import Call

_MAX_INLINE = 1 << 20  # largest checkpoint, in bytes, that is sent within its item
_PREVIEW_SIDE = 768  # pixels; a larger preview and a checkpoint might exceed the message limit
_STORE_WAIT = 5.0  # seconds that a finished picture waits for space in the blob store


class PictureStream:
    """Send the items of one call: progress per step, then the picture."""

    def __init__(
        self,
        call: Call,
        request: Draw,
        drawing: PictureRequest,
        rgb_preview: RGBPreview,
        store: BlobStore,
    ):
        self._call, self._request, self._drawing = call, request, drawing
        self._rgb_preview, self._store = rgb_preview, store

    async def send_event(self, event: Event) -> bool:
        """Send an event. Return True if it was the last; raise the error of a failed picture."""
        if isinstance(event, StepDone):
            await self._step(event)
            return False
        if event.error is not None:
            raise event.error
        if event.picture is not None:
            await self._send_picture(event.picture, event.steps)
        return True

    async def _step(self, step: StepDone) -> None:
        """Send the progress, but keep one credit for the picture.

        Without credit it is dropped, as it would be late.
        """
        if self._call.credit_left < 2:
            return
        preview = b""
        if step.estimate is not None:
            preview = await asyncio.to_thread(self._preview, step.estimate)
        checkpoint = await self._checkpoint(step) if step.checkpoint else None
        if self._call.credit_left >= 2:
            self._call.push(DenoisingProgress(step.step, step.steps, preview, checkpoint))

    def _preview(self, latents: Tensor) -> bytes:
        width, height = self._drawing.width, self._drawing.height
        scale = min(_PREVIEW_SIDE / max(width, height), 1.0)
        return self._encode(
            self._rgb_preview.picture(
                latents, (max(int(width * scale), 1), max(int(height * scale), 1))
            )
        )

    async def _checkpoint(self, step: StepDone) -> Checkpoint | None:
        if len(step.checkpoint) <= _MAX_INLINE:
            return Checkpoint(step.step, step.checkpoint)
        try:
            return Checkpoint(
                step.step,
                ref=await self._store.put_async(step.checkpoint, readers=[self._call.caller]),
            )
        except Overloaded:  # a checkpoint is optional
            return None

    async def _send_picture(self, picture: Image, steps: int) -> None:
        data = await asyncio.to_thread(self._encode, picture)
        ref = await self._store.put_async(data, readers=[self._call.caller], wait=_STORE_WAIT)
        await self._call.send(Picture(ref, *picture.size, steps))

    def _encode(self, picture: Image) -> bytes:
        return to_file(picture, self._request.format, self._request.quality)
