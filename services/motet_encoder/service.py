"""Serve the encoder actor, role `encoder`: a picture, video or sound in, embeddings out, by blob.

Files are fetched as blobs and prepared on threads; the engine encodes what is ready, many pictures
at a time. Embeddings are cached by the content of the file: a cached picture is neither fetched nor
encoded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from motet_kernels.runtime.device import find_device, readings
from motet_media.pictures import open_picture
from motet_media.pool import decoding
from motet_media.sound_file import RATE, read_audio
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import (
    BadRequest,
    BlobError,
    ConfigError,
    PayloadTooLarge,
    UnsupportedParameter,
)
from motet_shared.messages import Encode, EncodedImage, Image, ModelCard
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .cache import EmbeddingCache
from .checkpoint import load_family
from .config import EncoderConfig
from .engine import Engine
from .families import EncoderFamily, Prepared
from .shared_work import SharedWork
from .thread import MediaEncoder
from .video import open_video

log = logging.getLogger(__name__)

_PREPARING_THREADS = 2  # threads; bounded by the memory of the decoded pictures that they hold


class Encoder(Actor):
    """Serve the towers of one model."""

    role = "encoder"
    config: EncoderConfig

    def __init__(self, config: EncoderConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_active
        self._store = BlobStore.of(config, bus, config.cache_memory)
        self._cache = EmbeddingCache(self._store)
        self._work: SharedWork[EncodedImage] = SharedWork()
        self._threads = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="prepare")
        # Videos and sound have threads of their own, as they take longer than pictures.
        self._video_threads = ThreadPoolExecutor(_PREPARING_THREADS, thread_name_prefix="video")
        self._prepare_slots = asyncio.Semaphore(config.max_prepared)
        # One more than their threads: those that wait for a thread must not hold pictures back.
        self._long_slots = asyncio.Semaphore(_PREPARING_THREADS + 1)
        self._encoder: MediaEncoder | None = None
        self._card: ModelCard | None = None

    async def warm(self) -> None:
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        folder = Path(self.config.model)
        device = find_device(self.config.device, ConfigError)
        dtype = None if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
        family = await asyncio.to_thread(load_family, folder, dtype, self.config.weights, device)
        await asyncio.to_thread(family.warm_up)
        await self._store.start()
        self._encoder = MediaEncoder(Engine(family, self.config.max_patches), self.crash)
        created = int((folder / "config.json").stat().st_mtime)
        self._card = ModelCard(name=self.config.model_name, context=0, created=created)
        self.bus.monitor.duties.append(self._encoder.thread.watch(self.config.step_timeout))
        log.info("model loaded", extra={"model": self._card.name})

    async def close(self) -> None:
        for threads in (self._threads, self._video_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._encoder is not None:
            await self._encoder.close()
        await self._store.close()

    @property
    def encoder(self) -> MediaEncoder:
        """Return the encoder. Raises RuntimeError before `warm` has loaded the model."""
        if self._encoder is None:
            raise RuntimeError("the model is not loaded yet")
        return self._encoder

    @operation(Encode)
    async def encode(self, call: Call, request: Encode) -> None:
        """Send one `EncodedImage`. Calls for a picture that is being encoded share that work."""
        self.check_served(request.model)
        image = request.image
        _check(image, self.config)
        encoded = await (self._merged(image) if image.merged else self._encoded(image))
        await call.send(encoded)
        call.finish("stop")

    async def _encoded(self, image: Image) -> EncodedImage:
        """Return the embeddings of one file, from the cache if they are there."""
        data = None
        if not image.file.digest:
            data = await self._store.get(image.file, release=False)
        kind = "/video" if image.is_video else "/audio" if image.is_audio else ""
        name = f"{image.file.digest or _digest(data)}/{image.max_pixels}{kind}"
        if (encoded := self._cache.get(name)) is not None:
            return encoded
        try:
            return await self._work.result(name, lambda: self._encode(name, image, data))
        except BlobError:  # maybe the blob of another caller that has left; retry with this one
            return await self._work.result(name, lambda: self._encode(name, image, data))

    async def _merged(self, image: Image) -> EncodedImage:
        """Return the means of the embeddings of several pictures of one size."""
        ones, vectors = [], []
        for file in (*image.merged, image.file):
            ones.append(await self._encoded(msgspec.structs.replace(image, file=file, merged=[])))
            vectors.append(await self._vectors(ones[-1]))
        first = ones[0]
        name = "+".join(one.embedding.name for one in ones)
        if (encoded := self._cache.get(name)) is not None:
            return encoded
        if any((one.ids, one.embedding.grid) != (first.ids, first.embedding.grid) for one in ones):
            raise BadRequest(
                f"{image.param or 'image'}: pictures of several sizes cannot be merged; scale them "
                "to one size",
                param=image.param or None,
            )
        mean = torch.stack(vectors).mean(0)
        return await self._cache.put(name, mean, first.ids, first.embedding.grid)

    async def _vectors(self, encoded: EncodedImage) -> torch.Tensor:
        """Return cached embeddings. Raises BlobError if they were evicted meanwhile."""
        ref = encoded.embedding.embeddings
        data = await self._store.get(ref, release=False)
        return torch.frombuffer(data, dtype=torch.float32).reshape(ref.shape)

    async def _encode(self, name: str, image: Image, data: memoryview | None) -> EncodedImage:
        if data is None:
            data = await self._store.get(image.file, release=False)
        is_long = image.is_video or image.is_audio
        threads = self._video_threads if is_long else self._threads
        family = self.encoder.thread.engine.family
        async with self._long_slots if is_long else self._prepare_slots:
            picture = await decoding(
                _prepare, family, bytes(data), image, self.config, executor=threads
            )
            embeddings = await self.encoder.encode(picture)
        return await self._cache.put(name, embeddings, picture.ids, picture.grid, picture.interval)

    def load(self) -> dict[str, float]:
        if self._encoder is None:
            return {}
        thread = self._encoder.thread
        busy = {"engine_busy": thread.busy_seconds, "queued": thread.stats()["waiting"]}
        return {**busy, **readings()}

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Return numbers, which are metrics too, and the choices made when the model was loaded."""
        if self._encoder is None:
            return {}
        thread = self._encoder.thread
        chosen = {"weights": self.config.weights, **thread.engine.family.describe()}
        return {**thread.stats(), **self._cache.stats(), **self._store.stats(), **chosen}

    def check_integrity(self) -> None:
        """Check an idle actor: no picture is being encoded, and the store is consistent."""
        super().check_integrity()
        self._store.check_integrity()
        if not self.bus.calls.active and (len(self._work) or self.encoder.thread.engine.has_work):
            raise RuntimeError("no call is active, but a picture is being encoded")


def _check(image: Image, config: EncoderConfig) -> None:
    largest = max(file.nbytes for file in (image.file, *image.merged))
    if largest > config.max_file:
        message = f"{image.param or 'image'}: the file has {largest} bytes"
        message += f"; at most {config.max_file} are read"
        raise PayloadTooLarge(message, param=image.param or None)
    if image.merged and (image.is_video or image.is_audio):
        raise UnsupportedParameter(
            "image.merged: only pictures can be merged; omit it", param="image.merged"
        )
    if image.max_pixels < 0:
        raise BadRequest(
            f"max_pixels: {image.max_pixels} is negative; give 0 for no limit", param="max_pixels"
        )


def _digest(data: memoryview | None) -> str:
    return hashlib.blake2b(data or b"", digest_size=16).hexdigest()


def _prepare(family: EncoderFamily, data: bytes, image: Image, config: EncoderConfig) -> Prepared:
    param = image.param or "image"
    if image.is_video:
        return _prepare_video(family, data, image, config)
    if image.is_audio:
        return _prepare_sound(family, data, param, config)
    picture = open_picture(data, max_pixels=config.max_picture, param=param)
    try:
        return family.prepare(picture, image.max_pixels)
    except UnsupportedParameter as error:
        raise UnsupportedParameter(f"{param}: {error}", param=param) from None
    except ValueError as error:
        size = f"{picture.width}×{picture.height}"
        raise BadRequest(
            f"{param}: this model cannot encode {size} pixels: {error}", param=param
        ) from error


def _prepare_sound(
    family: EncoderFamily, data: bytes, param: str, config: EncoderConfig
) -> Prepared:
    """Decode a recording in a child process. Errors name `param`."""
    try:
        return family.prepare_sound(read_audio(data, config.max_sound), RATE)
    except UnsupportedParameter as error:
        raise UnsupportedParameter(f"{param}: {error}", param=param) from None
    except BadRequest as error:
        raise BadRequest(f"{param}: {error}", param=param) from None
    except ValueError as error:
        raise BadRequest(
            f"{param}: this model cannot encode the recording: {error}", param=param
        ) from error


def _prepare_video(
    family: EncoderFamily, data: bytes, image: Image, config: EncoderConfig
) -> Prepared:
    param = image.param or "video"
    limits = {"max_pixels": config.max_picture, "max_length": config.max_video}
    video = open_video(data, count=config.max_frames, param=param, **limits)
    try:
        return family.prepare_video(video, image.max_pixels)
    except UnsupportedParameter as error:
        raise UnsupportedParameter(f"{param}: {error}", param=param) from None
    except ValueError as error:
        width, height = video.frames[0].size
        raise BadRequest(
            f"{param}: this model cannot encode {width}×{height} pixels: {error}", param=param
        ) from error
