"""Draw: a prompt in, estimates of the picture while it forms, and the picture, on whichever instance is alive.

    outcome = Drawn()
    async with aclosing(draw(bus, store, Draw(model="pocket-draw", prompt="two red circles"), outcome)) as strokes:
        async for stroke in strokes:  # Stroke: step, steps, now and then a preview
            print(f"{stroke.step}/{stroke.steps}")
    Path("circles.png").write_bytes(outcome.data)

With `checkpoint_every` in the request, a picture whose instance dies goes on at another one from the last checkpoint,
else from its beginning: the noise depends on the seed alone, so it is the same picture. A step is told once. Pictures
to be changed lie in `store` only while an instance fetches them. Leaving the generator early is a remote cancel;
`aclosing` makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.errors import BlobError, StreamBroken
from motet_shared.messages import BlobRef, Checkpoint, Draw, Picture, Stroke
from motet_shared.stream import Stream

from .files import Bytes, lent
from .moves import Moved, Moves

ROLE = "diffusion"
_INLINE = 1 << 20  # bytes of a checkpoint that travels in its request


@dataclass(slots=True, kw_only=True)
class Drawn(Moved):
    """What there is to know of a picture; complete once the generator has ended."""

    data: bytes = b""  # the file
    width: int = 0
    height: int = 0
    step: int = 0  # that are done
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
) -> AsyncGenerator[Stroke, None]:
    """Yield a stroke per step, as far as the caller keeps up; the picture is then in `outcome`.

    `image` and `mask` are files, in the place of the request's. `deadline`: seconds for all of it. `patience`: seconds
    without progress, in which an instance may appear or restart, before the last retryable error is raised. Other
    errors are raised at once, Overloaded too unless a step was made.
    """
    outcome = outcome or Drawn()
    attempt = _Attempt(bus, store, request, outcome, image, mask)
    moves = Moves(
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
    """A picture at one instance after another, and what is kept of it from one to the next."""

    def __init__(
        self, bus: Bus, store: BlobStore, request: Draw, outcome: Drawn, image: Bytes | None, mask: Bytes | None
    ):
        self._bus, self._store, self._request, self._outcome = bus, store, request, outcome
        self._image, self._mask = image, mask
        self._kept: tuple[int, bytes] | None = None  # (steps done, checkpoint)

    @asynccontextmanager
    async def asked(self, instance: str) -> AsyncIterator[Draw]:
        """The request to an instance, with its files lent to it."""
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

    async def strokes(self, stream: Stream) -> AsyncGenerator[Stroke, None]:
        async for batch in stream.batches():
            for item in batch:
                if isinstance(item, Picture):
                    await self._take(item)
                elif isinstance(item, Stroke):
                    if item.checkpoint is not None:
                        await self._keep(item.checkpoint)
                    if item.step > self._outcome.step:
                        self._outcome.step, self._outcome.steps = item.step, item.steps
                        yield item

    async def _keep(self, checkpoint: Checkpoint) -> None:
        """Held here: whoever made it may not be there when it is needed."""
        data = checkpoint.data
        if checkpoint.ref is not None:
            try:
                data = bytes(await self._store.get(checkpoint.ref))
            except BlobError:
                return  # the one before it will do
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
async def _perhaps(store: BlobStore, data: Bytes | None, instance: str) -> AsyncIterator[BlobRef | None]:
    """The file in `store`, if there is one."""
    if data is None:
        yield None
    else:
        async with lent(store, data, instance) as ref:
            yield ref
