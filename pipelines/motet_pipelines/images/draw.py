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

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from motet_pipelines.answers import Answers
from motet_pipelines.voice.sound_files import Bytes, lent
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BlobError, Overloaded, StreamBroken
from motet_shared.messages import BlobRef, Checkpoint, DenoisingProgress, Draw, Picture
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import Failover, StreamMoves
from motet_shared.wire.stream import Stream

ROLE = "diffusion"
_INLINE = 1 << 20  # largest checkpoint, in bytes, that is sent within its request


_End = tuple[bytes, int, int, int]  # the file, width, height, steps; of videos never recorded
_strokes = msgspec.msgpack.Decoder(DenoisingProgress)
_ends: msgspec.msgpack.Decoder[_End] = msgspec.msgpack.Decoder(_End)


@dataclass(slots=True, kw_only=True)
class Drawn(StreamMoves):
    """Result of `draw` and its progress; complete once the generator has ended."""

    data: bytes = b""  # the file
    width: int = 0
    height: int = 0
    step: int = 0  # denoising steps done
    steps: int = 0
    seconds: float = 0.0  # length of a video; 0: a picture


async def draw(
    bus: Bus,
    store: BlobStore,
    request: Draw,
    outcome: Drawn | None = None,
    *,
    image: Bytes | None = None,
    mask: Bytes | None = None,
    controls: Sequence[Bytes] = (),
    prompts: Sequence[Bytes] = (),
    deadline: float | None = None,
    patience: float = 5.0,
) -> AsyncGenerator[DenoisingProgress, None]:
    """Yield a stroke per step, as far as the caller keeps up; then the picture is in `outcome`.

    `image`, `mask`, and those of `controls` and image `prompts`, one each, are files that replace
    those of the request. `deadline`: seconds for
    everything. `patience`: seconds without progress, in which an instance may appear or restart,
    before the last retryable error is raised. Other errors are raised at once, Overloaded too
    unless a step was made.
    """
    outcome = outcome or Drawn()
    files = _Files(image, mask, controls, prompts)
    answers = Answers(request, _strokes, _ends)
    attempt = _Attempt(bus, store, request, outcome, files, answers)
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
    while (stroke := await answers.recorded()) is not None:
        attempt.again(stroke)
        yield stroke
    if answers.end is not None:
        outcome.data, outcome.width, outcome.height, outcome.steps = answers.end
        outcome.step = outcome.steps
        return
    epoch = answers.epoch()
    async with answers.live():
        while True:
            async with moves as instance, attempt.asked(instance) as asked:
                async with bus.open(
                    ROLE, asked, instance=instance, deadline=moves.left(), epoch=epoch
                ) as stream:
                    async for stroke in attempt.strokes(stream):
                        yield stroke
                if outcome.data:
                    end = (outcome.data, outcome.width, outcome.height, outcome.steps)
                    await answers.finish(end)
                    return


@dataclass(frozen=True, slots=True)
class _Files:
    """Hold the files of a picture that is changed, or drawn by others."""

    image: Bytes | None
    mask: Bytes | None
    controls: Sequence[Bytes]
    prompts: Sequence[Bytes]

    async def lend(
        self, stack: AsyncExitStack, store: BlobStore, request: Draw, instance: str
    ) -> Draw:
        """Return the request for `instance`, with its files lent to that until `stack` closes."""

        async def ref(data: Bytes) -> BlobRef:
            return await stack.enter_async_context(lent(store, data, instance))

        controls = [
            msgspec.structs.replace(one, image=await ref(data))
            for one, data in zip(request.controls, self.controls, strict=True)
        ]
        prompts = [
            msgspec.structs.replace(one, image=await ref(data))
            for one, data in zip(request.image_prompts, self.prompts, strict=True)
        ]
        return msgspec.structs.replace(
            request,
            image=None if self.image is None else await ref(self.image),
            mask=None if self.mask is None else await ref(self.mask),
            controls=controls,
            image_prompts=prompts,
        )


class _Attempt:
    """Hold the request and the last checkpoint of a picture across attempts."""

    def __init__(
        self,
        bus: Bus,
        store: BlobStore,
        request: Draw,
        outcome: Drawn,
        files: _Files,
        answers: Answers[DenoisingProgress, _End],
    ):
        self._bus, self._store, self._request, self._outcome = bus, store, request, outcome
        self._files, self._answers = files, answers
        self._kept: tuple[int, bytes] | None = None  # (steps done, checkpoint)

    @asynccontextmanager
    async def asked(self, instance: str) -> AsyncIterator[Draw]:
        """Yield the request for `instance`, with its files lent to that instance."""
        async with AsyncExitStack() as stack:
            asked = await self._files.lend(stack, self._store, self._request, instance)
            if self._kept is None:
                yield asked
            elif len(self._kept[1]) <= _INLINE:
                yield msgspec.structs.replace(asked, resume=Checkpoint(*self._kept))
            else:
                yield await self._resumed(stack, asked, *self._kept, instance)

    async def _resumed(
        self, stack: AsyncExitStack, asked: Draw, step: int, data: bytes, instance: str
    ) -> Draw:
        """Return the request with a checkpoint, lent until `stack` closes; without one that does not fit."""
        try:
            ref = await stack.enter_async_context(lent(self._store, data, instance))
        except (BlobError, Overloaded):
            return asked
        return msgspec.structs.replace(asked, resume=Checkpoint(step, ref=ref))

    async def strokes(self, stream: Stream) -> AsyncGenerator[DenoisingProgress, None]:
        async for batch in stream.batches():
            for item in batch:
                if isinstance(item, Picture):
                    await self._take(item)
                elif isinstance(item, DenoisingProgress):
                    if item.checkpoint is not None:
                        item.checkpoint = await self._keep(item.checkpoint)
                    if item.step > self._outcome.step:
                        await self._answers.record(item)
                        self._outcome.step, self._outcome.steps = item.step, item.steps
                        yield item

    def again(self, stroke: DenoisingProgress) -> None:
        """Note a stroke of another process."""
        self._outcome.step, self._outcome.steps = stroke.step, stroke.steps
        if stroke.checkpoint is not None:
            self._kept = stroke.checkpoint.step, stroke.checkpoint.data

    async def _keep(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Copy a checkpoint here, as the instance that made it may be gone when it is needed.

        Returns the copy, None if it cannot be had.
        """
        data = checkpoint.data
        if checkpoint.ref is not None:
            try:
                data = bytes(await self._store.get(checkpoint.ref))
            except BlobError:
                return None  # the previous checkpoint remains
        self._kept = checkpoint.step, data
        return Checkpoint(checkpoint.step, data)

    async def _take(self, picture: Picture) -> None:
        try:
            data = bytes(await self._store.get(picture.ref))
        except BlobError as error:
            raise StreamBroken(f"the picture was lost on its way: {error.message}") from error
        outcome = self._outcome
        outcome.data, outcome.width, outcome.height = data, picture.width, picture.height
        outcome.step = outcome.steps = picture.steps
        if picture.frame_rate:
            outcome.seconds = picture.frames / picture.frame_rate
