"""Draw: a prompt in, a stroke per denoising step, previews and the picture out, with failover.

    outcome = Drawn()
    request = Draw(model="pocket-draw", prompt="two red circles")
    async with aclosing(draw(bus, store, request, outcome)) as strokes:
        async for stroke in strokes:  # DenoisingProgress: step, steps, now and then a preview
            print(f"{stroke.step}/{stroke.steps}")
    Path("circles.png").write_bytes(outcome.data)

With `checkpoint_every` in the request, a picture whose instance dies continues at another instance
from the last checkpoint, else from its beginning: the noise depends on the seed alone, so it is the
same picture. Each step is yielded once. Input pictures lie in `store` only while an instance
fetches them. Leaving the generator early is a remote cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from motet_pipelines.voice.sound_files import Bytes, lent
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BlobError, StreamBroken
from motet_shared.messages import BlobRef, Checkpoint, DenoisingProgress, Draw, Picture
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves
from motet_shared.wire.stream import Stream

ROLE = "diffusion"
_INLINE = 1 << 20  # largest checkpoint, in bytes, that is sent within its request


@dataclass(slots=True, kw_only=True)
class Drawn(StreamMoves):
    """Result of `draw` and its progress; complete once the generator has ended."""

    data: bytes = b""  # the file
    width: int = 0
    height: int = 0
    step: int = 0  # denoising steps done
    steps: int = 0


async def draw(
    bus: Bus,
    store: BlobStore,
    request: Draw,
    outcome: Drawn | None = None,
    *,
    image: Bytes | None = None,
    mask: Bytes | None = None,
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[DenoisingProgress, None]:
    """Yield a stroke per step, as far as the caller keeps up; then the picture is in `outcome`.

    `image` and `mask` are files that replace those of the request. `deadline`: seconds for
    everything. `patience`: seconds without progress, in which an instance may appear or restart,
    before the last retryable error is raised. Other errors are raised at once, Overloaded too
    unless a step was made.
    """
    outcome = outcome or Drawn()
    attempt = _Attempt(bus, store, request, outcome, image, mask)
    moves = Failover(
        bus,
        ROLE,
        request.model,
        outcome,
        lambda: outcome.step,
        patience=patience,
        deadline=deadline,
        what="picture",
    )
    while True:
        async with moves as instance, attempt.asked(instance) as asked:
            async with bus.open(ROLE, asked, instance=instance, deadline=moves.left()) as stream:
                async for stroke in attempt.strokes(stream):
                    yield stroke
            if outcome.data:
                return


class _Attempt:
    """Hold the request and the last checkpoint of a picture across attempts."""

    def __init__(
        self,
        bus: Bus,
        store: BlobStore,
        request: Draw,
        outcome: Drawn,
        image: Bytes | None,
        mask: Bytes | None,
    ):
        self._bus, self._store, self._request, self._outcome = bus, store, request, outcome
        self._image, self._mask = image, mask
        self._kept: tuple[int, bytes] | None = None  # (steps done, checkpoint)

    @asynccontextmanager
    async def asked(self, instance: str) -> AsyncIterator[Draw]:
        """Yield the request for `instance`, with its files lent to that instance."""
        async with (
            _perhaps(self._store, self._image, instance) as image,
            _perhaps(self._store, self._mask, instance) as mask,
        ):
            asked = msgspec.structs.replace(self._request, image=image, mask=mask)
            if self._kept is None:
                yield asked
            elif len(self._kept[1]) <= _INLINE:
                yield msgspec.structs.replace(asked, resume=Checkpoint(*self._kept))
            else:
                async with lent(self._store, self._kept[1], instance) as ref:
                    yield msgspec.structs.replace(asked, resume=Checkpoint(self._kept[0], ref=ref))

    async def strokes(self, stream: Stream) -> AsyncGenerator[DenoisingProgress, None]:
        async for batch in stream.batches():
            for item in batch:
                if isinstance(item, Picture):
                    await self._take(item)
                elif isinstance(item, DenoisingProgress):
                    if item.checkpoint is not None:
                        await self._keep(item.checkpoint)
                    if item.step > self._outcome.step:
                        self._outcome.step, self._outcome.steps = item.step, item.steps
                        yield item

    async def _keep(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint here, as the instance that made it may be gone when it is needed."""
        data = checkpoint.data
        if checkpoint.ref is not None:
            try:
                data = bytes(await self._store.get(checkpoint.ref))
            except BlobError:
                return  # the previous checkpoint remains
        self._kept = checkpoint.step, data

    async def _take(self, picture: Picture) -> None:
        try:
            data = bytes(await self._store.get(picture.ref))
        except BlobError as error:
            raise StreamBroken(f"the picture was lost on its way: {error.message}") from error
        outcome = self._outcome
        outcome.data, outcome.width, outcome.height = data, picture.width, picture.height
        outcome.step = outcome.steps = picture.steps


@asynccontextmanager
async def _perhaps(
    store: BlobStore, data: Bytes | None, instance: str
) -> AsyncIterator[BlobRef | None]:
    """Lend the file to `instance` while in the block; yield None if there is no file."""
    if data is None:
        yield None
    else:
        async with lent(store, data, instance) as ref:
            yield ref
