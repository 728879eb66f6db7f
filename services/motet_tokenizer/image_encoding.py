"""Have the encoder service encode the pictures of a chat into image embeddings."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from typing import cast

from motet_shared.errors import (
    BadRequest,
    InternalError,
    MotetError,
    NoAllowedSite,
    Overloaded,
    StreamBroken,
    Unavailable,
)
from motet_shared.messages import Chat, Encode, EncodedImage, Image
from motet_shared.wire import sites
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_tokenizer.config import TokenizerConfig

ROLE = "encoder"
PAUSE = 0.05  # seconds before another attempt after a failed one
# An instance died, is gone or is full, so another may succeed; a faulty picture fails everywhere.
_RETRYABLE = (StreamBroken, Unavailable, Overloaded)


class ImageEncoding:
    """Route pictures to encoder instances by their heartbeats.

    A picture always goes to the same instance while that lives, as it is cached there from earlier
    turns.
    """

    def __init__(self, bus: Bus, config: TokenizerConfig):
        self._bus = bus
        self._config = config

    def check_count(self, request: Chat) -> None:
        """Raise BadRequest for more pictures than `max_images`."""
        if len(request.images) > self._config.max_images:
            raise BadRequest(
                f"messages: have {len(request.images)} images; at most {self._config.max_images} are possible",
                param="messages",
            )

    def is_possible(self, model: str) -> bool:
        """Return True if an encoder of a model's pictures is ready, or will be."""
        directory = self._bus.directory
        base = directory.base_of(model)
        return bool(directory.ready(ROLE, model=base)) or directory.is_coming(ROLE, base)

    async def encode_images(self, call: Call, request: Chat) -> list[EncodedImage]:
        """Return the embeddings of each picture, in order. The first error of any ends them all."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._encode_image(call, request, image))
                    for image in request.images
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _encode_image(self, call: Call, request: Chat, image: Image) -> EncodedImage:
        """Encode one picture at any live instance.

        Raises the last error after a time without an instance, or after `max_moves` failures.
        """
        loop = asyncio.get_running_loop()
        model = self._bus.directory.base_of(request.model)  # adapters share the model's towers
        retry_until = loop.time() + self._bus.directory.presence.patience(
            ROLE, model, self._config.decode_wait
        )
        failures = 0
        avoid: set[str] = set()
        while True:
            instance = await self._choose(model, image, avoid, max(retry_until - loop.time(), 0.0))
            try:
                return await self._ask(call, request, image, instance)
            except _RETRYABLE as error:
                if isinstance(error, NoAllowedSite):
                    raise
                failures += not isinstance(error, Overloaded)
                if loop.time() >= retry_until or failures > self._config.max_moves:
                    raise
                avoid = self._next_avoided(error, instance, avoid, model)
                await asyncio.sleep(PAUSE)

    def _next_avoided(
        self, error: MotetError, instance: str, avoid: set[str], model: str
    ) -> set[str]:
        """Return the instances to avoid next; none if all ready ones would be."""
        if not isinstance(error, StreamBroken | Overloaded):
            self._bus.directory.suspect(instance)
        avoid = avoid | {instance}
        return avoid if self._pick(model, "", avoid) is not None else set()

    async def _choose(
        self, model: str, image: Image, avoid: Collection[str], patience: float
    ) -> str:
        key = image.file.digest
        if (instance := self._pick(model, key, avoid)) is not None:
            return instance
        directory = self._bus.directory
        if not directory.may_serve(ROLE):
            raise sites.refusal(f"{ROLE} for {model!r}")
        try:
            with directory.wanting(ROLE, model):
                return str(
                    await directory.wait_for(lambda _: self._pick(model, key, avoid), patience)
                )
        except TimeoutError:
            if sites.allowed():
                raise sites.refusal(f"{ROLE} for {model!r}") from None
            raise Unavailable(
                f"no encoder instance for model {model!r} is ready; retry in a moment",
                param="model",
            ) from None

    def _pick(self, model: str, key: str, avoid: Collection[str]) -> str | None:
        """Return the instance by rendezvous hashing: if one is lost, only its pictures move."""
        directory = self._bus.directory
        ready = [b for b in directory.ready(ROLE, model=model) if b.instance not in avoid]
        names = [beat.instance for beat in directory.preferred(ready)]
        return max(
            names, key=lambda name: hashlib.blake2b(f"{key}/{name}".encode()).digest(), default=None
        )

    async def _ask(self, call: Call, request: Chat, image: Image, instance: str) -> EncodedImage:
        encode = Encode(
            model=self._bus.directory.base_of(request.model),
            image=image,
            request_id=request.request_id,
        )
        stream = self._bus.open(
            ROLE, encode, instance=instance, deadline=call.remaining(), epoch=call.epoch
        )
        async with stream:
            async for item in stream:
                return cast(EncodedImage, item)
        raise InternalError(f"{instance} ended its stream without an image")
