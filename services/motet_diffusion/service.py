"""Serve the diffusion engine as an actor: role `diffusion`, operation `draw`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL.Image import Image

from motet_diffusion.engine.engine import Engine
from motet_diffusion.engine.request import (
    Control,
    Event,
    ImagePrompt,
    Key,
    Lora,
    PictureRequest,
)
from motet_diffusion.engine.thread import EngineThread
from motet_kernels.runtime.device import readings
from motet_media.pictures import open_mask, open_picture
from motet_media.pool import decoding
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, PayloadTooLarge
from motet_shared.messages import VIDEO_FORMS, BlobRef, Draw, ModelCard
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .config import DiffusionConfig
from .picture_stream import PictureStream

log = logging.getLogger(__name__)

_MAX_MP4_SIDE = 16_384  # pixels; x264 encodes no larger ones


class Diffusion(Actor):
    """Serve one diffusion model."""

    role = "diffusion"
    config: DiffusionConfig

    def __init__(self, config: DiffusionConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_running + config.max_waiting
        self.events: dict[Key, asyncio.Queue[Event]] = {}
        self._store = BlobStore.of(config, bus, config.picture_memory)
        self._thread: EngineThread | None = None
        self._card: ModelCard | None = None

    async def warm(self) -> None:
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        engine_config = self.config.engine()
        engine = await asyncio.to_thread(
            Engine, engine_config, lambda event: call_soon(self._deliver, event)
        )
        await self._store.start()
        created = int((Path(self.config.model) / "model_index.json").stat().st_mtime)
        is_video = engine.factory.rules.is_video
        self._card = ModelCard(
            name=engine_config.model_name, context=0, created=created, videos=is_video
        )
        self._thread = EngineThread.on_loop(
            engine, lambda events: list(map(self._deliver, events)), self.crash
        )
        self.bus.monitor.duties.append(self.thread.watch(self.config.step_timeout))
        kind = type(engine.factory.pipeline).__name__
        log.info(
            "model loaded",
            extra={"model": self._card.name, "pipeline": kind, "edits": engine.factory.rules.edits},
        )

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
        await self._store.close()

    @property
    def thread(self) -> EngineThread:
        """Return the engine's thread. Raises RuntimeError before `warm` has loaded the model."""
        if self._thread is None:
            raise RuntimeError("the model is not loaded yet")
        return self._thread

    def _deliver(self, event: Event) -> None:
        """Queue an event for its call, on the event loop. Drop events of cancelled pictures."""
        if (queue := self.events.get(event.key)) is not None:
            queue.put_nowait(event)

    # ------------------------------------------------------------------------------------ operation
    @operation(Draw)
    async def draw(self, call: Call, request: Draw) -> None:
        """Draw one picture or video and stream its steps."""
        self.check_served(request.model)
        drawing = await self._drawing(request)
        engine = self.thread.engine
        rules = engine.factory.rules
        stream = PictureStream(
            call,
            request,
            drawing,
            engine.rgb_preview,
            self._store,
            rules.frame_rate,
            rules.sound_rate,
        )
        queue = self.events[call.id] = asyncio.Queue()
        self.thread.submit(call.id, drawing)
        done = False
        try:
            while not done:
                done = await stream.send_event(await queue.get())
        finally:
            del self.events[call.id]
            if not done:
                self.thread.cancel(call.id)
        call.finish("stop")

    async def _drawing(self, request: Draw) -> PictureRequest:
        """Return the engine's request.

        Everything that can be checked is, before any blob is fetched.
        """
        if (length := len(request.prompt)) > self.config.longest_text:
            message = f"prompt: {length} characters; at most {self.config.longest_text} are read (longest_text)"
            raise PayloadTooLarge(message, param="prompt")
        if request.mask is not None and request.image is None:
            raise BadRequest(
                "mask: has no image that it belongs to; send `image` too", param="mask"
            )
        drawing = PictureRequest(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            width=request.width,
            height=request.height,
            steps=request.steps,
            guidance_scale=request.guidance_scale,
            seed=request.seed & (2**63 - 1),
            strength=request.strength,
            seconds=request.seconds,
            previews=max(request.previews, 0),
            checkpoint_every=max(request.checkpoint_every, 0),
            scheduler=request.scheduler,
            loras=tuple(Lora(one.name, one.scale) for one in request.loras),
            controls=tuple(
                Control(one.name, scale=one.scale, start=one.start, end=one.end)
                for one in request.controls
            ),
            image_prompts=tuple(
                ImagePrompt(one.name, scale=one.scale) for one in request.image_prompts
            ),
        )
        self._check_format(request)
        self.thread.engine.factory.check(drawing)
        kind = "draw" if request.image is None else "change" if request.mask is None else "fill"
        self.thread.engine.factory.rules.completed(drawing, kind)
        if request.image is not None:
            drawing = await self._with_images(drawing, request.image, request.mask)
        drawing = await self._with_conditions(drawing, request)
        drawing = self.thread.engine.factory.rules.completed(drawing)
        return replace(drawing, **await self._resumed(request))

    def _check_format(self, request: Draw) -> None:
        """Raise BadRequest if a video is asked of a model of pictures, or the other way round.

        So is a video of a size that its format does not have.
        """
        is_video = self.thread.engine.factory.rules.is_video
        if request.format == "mp4" and max(request.width, request.height) > _MAX_MP4_SIDE:
            message = f"size: a side has at most {_MAX_MP4_SIDE} pixels in mp4; make it smaller"
            raise BadRequest(message, param="size")
        if (request.format in VIDEO_FORMS) == is_video:
            return
        makes, remedy = ("videos", "mp4 or webm") if is_video else ("pictures", "png, jpeg or webp")
        message = f"format: {request.model} makes {makes}, no {request.format}; give {remedy}"
        raise BadRequest(message, param="format")

    async def _with_images(
        self, drawing: PictureRequest, image: BlobRef, mask: BlobRef | None
    ) -> PictureRequest:
        picture = await self._picture(image, open_picture)
        if mask is None:
            return replace(drawing, image=picture)
        where = await self._picture(mask, open_mask)
        if where.size != picture.size:
            sizes = "{}x{} pixels, the image {}x{}".format(*where.size, *picture.size)
            raise BadRequest(f"mask: has {sizes}; both must be of one size", param="mask")
        return replace(drawing, image=picture, mask=where)

    async def _with_conditions(self, drawing: PictureRequest, request: Draw) -> PictureRequest:
        """Return the request with the images that ControlNets and IP-Adapters read."""
        controls = [
            one._replace(image=await self._condition(given.image, f"controlnets[{number}].image"))
            for number, (one, given) in enumerate(
                zip(drawing.controls, request.controls, strict=True)
            )
        ]
        prompts = [
            one._replace(image=await self._condition(given.image, f"ip_adapters[{number}].image"))
            for number, (one, given) in enumerate(
                zip(drawing.image_prompts, request.image_prompts, strict=True)
            )
        ]
        return replace(drawing, controls=tuple(controls), image_prompts=tuple(prompts))

    async def _condition(self, ref: BlobRef | None, param: str) -> Image:
        if ref is None:
            raise BadRequest(f"{param}: is missing; send the image that is followed", param=param)
        return await self._picture(ref, open_picture, param=param)

    async def _picture(self, ref: BlobRef, read: Callable[..., Image], param: str = "") -> Image:
        data = bytes(await self._store.get(ref))
        fields = {"param": param} if param else {}
        return await decoding(partial(read, **fields), data, max_pixels=self.config.max_pixels)

    async def _resumed(self, request: Draw) -> dict[str, Any]:
        """Return the fields of the checkpoint that the picture resumes from."""
        if (resume := request.resume) is None:
            return {}
        data = resume.data if resume.ref is None else bytes(await self._store.get(resume.ref))
        return {"resume": data, "resume_step": resume.step}

    # --------------------------------------------------------------------------------------- health
    def load(self) -> dict[str, float]:
        if self._thread is None:
            return {}
        stats = self._thread.stats()
        waiting = stats["waiting"] + stats["commands"]
        numbers = {"running": stats["running"], "queued": waiting, "pictures": stats["pictures"]}
        return numbers | readings()

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        return {**self._thread.stats(), **self._store.stats()} if self._thread is not None else {}

    def check_integrity(self) -> None:
        """Check an idle actor; the engine is checked on this thread."""
        super().check_integrity()
        if not self.bus.calls.active and self.events:
            raise RuntimeError(
                f"no call is active, but {len(self.events)} pictures have event queues"
            )
        self.thread.engine.check_integrity()
        self._store.check_integrity()
