"""Stream one picture or video to one caller: engine events become items, threads encode files."""

from __future__ import annotations

import asyncio
from typing import Any

from PIL.Image import Image
from torch import Tensor

from motet_diffusion.engine.request import (
    Event,
    FramesDecoded,
    PictureRequest,
    SoundDecoded,
    StepDone,
)
from motet_diffusion.pipeline.estimate import RGBPreview
from motet_media.pictures import to_file
from motet_media.video_file import VideoWriter
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BlobError, Overloaded
from motet_shared.messages import VIDEO_FORMS, Checkpoint, DenoisingProgress, Draw, Picture
from motet_shared.wire.call import Call

_MAX_INLINE = 1 << 20  # largest checkpoint, in bytes, that is sent within its item
_PREVIEW_SIDE = 768  # pixels; a larger preview and a checkpoint might exceed the message limit
_STORE_WAIT = 5.0  # seconds that a finished picture waits for space in the blob store


class PictureStream:
    """Send the items of one call: progress per step, then the picture or video.

    frame_rate: of a video, whose frames are encoded as they come; 0 for a picture. sound_rate:
    samples per second of its sound; 0: none.
    """

    def __init__(
        self,
        call: Call,
        request: Draw,
        drawing: PictureRequest,
        rgb_preview: RGBPreview,
        store: BlobStore,
        frame_rate: float = 0.0,
        sound_rate: int = 0,
    ):
        self._call, self._request, self._drawing = call, request, drawing
        self._rgb_preview, self._store = rgb_preview, store
        self._frame_rate = frame_rate
        self._video = None
        if frame_rate and request.format in VIDEO_FORMS:
            self._video = VideoWriter(frame_rate, request.format, sound_rate)

    async def send_event(self, event: Event) -> bool:
        """Send an event. Return True if it was the last; raise the error of a failed picture."""
        if isinstance(event, StepDone):
            await self._step(event)
            return False
        if isinstance(event, FramesDecoded):
            if self._video is not None:
                await asyncio.to_thread(self._video.add, event.frames)
            return False
        if isinstance(event, SoundDecoded):
            if self._video is not None:
                await asyncio.to_thread(self._video.add_sound, event.samples)
            return False
        if event.error is not None:
            raise event.error
        if event.picture is not None:
            data = await asyncio.to_thread(self._encode, event.picture)
            await self._send(data, *event.picture.size, event.steps)
        elif (video := self._video) is not None:
            data = await asyncio.to_thread(video.finish)
            shape = (video.width, video.height, event.steps, video.frames, self._frame_rate)
            await self._send(data, *shape)
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
        except (Overloaded, BlobError):  # it is optional; one of a large video may never fit
            return None

    async def _send(self, data: bytes, *shape: Any) -> None:
        ref = await self._store.put_async(data, readers=[self._call.caller], wait=_STORE_WAIT)
        await self._call.send(Picture(ref, *shape))

    def _encode(self, picture: Image) -> bytes:
        """Return a picture, or the preview of a video, as a file."""
        form = self._request.format
        if form == "mp4" or form == "webm":
            form = "webp"
        return to_file(picture, form, self._request.quality)
