"""Run the encoder engine: pictures in, embeddings out, batched within a budget of patches.

It uses no threads and no network.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from motet_kernels.runtime.missing_memory import check_device
from motet_shared.errors import BadRequest, InternalError, MotetError, model_error
from motet_shared.process.batch_isolation import computed

from .families import EncoderFamily, Prepared

Key = Hashable


@dataclass(slots=True)
class StepOutput:
    """Report the result of one picture: embeddings `[L, T, X]`, or the error."""

    key: Key
    result: Tensor | MotetError


class Engine:
    """Encode pictures in order of arrival, batched with similar ones that wait.

    `add` and `cancel` are called between steps.
    """

    def __init__(self, family: EncoderFamily, max_patches: int):
        self.family = family
        self._max_patches = max_patches
        self._waiting: dict[Key, Prepared] = {}
        self._counts = {"steps": 0, "pictures": 0, "patches": 0, "batch_size": 0}

    def add(self, key: Key, picture: Prepared) -> None:
        if key in self._waiting:
            raise BadRequest(f"key: {key!r} is in use by another picture")
        self._waiting[key] = picture

    def cancel(self, key: Key) -> None:
        """Drop a picture; unknown keys are ignored."""
        self._waiting.pop(key, None)

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something."""
        return bool(self._waiting)

    def step(self) -> list[StepOutput]:
        """Encode the next batch; only a picture that cannot be encoded alone fails."""
        batch = self._batch()
        if not batch:
            return []
        self._counts["steps"] += 1
        self._counts["pictures"] += len(batch)
        self._counts["patches"] += sum(picture.patches for picture in batch.values())
        self._counts["batch_size"] = len(batch)
        found = computed(self.family.encode, list(batch.values()))
        return [self._output(*each) for each in zip(batch, batch.values(), found, strict=True)]

    def _batch(self) -> dict[Key, Prepared]:
        """Take the first waiting picture, and those that can join it within the budget."""
        batch: dict[Key, Prepared] = {}
        left, batch_key = self._max_patches, None
        for key, picture in self._waiting.items():
            if batch and (picture.batch_key != batch_key or picture.patches > left):
                continue
            batch[key], batch_key = picture, picture.batch_key
            left -= picture.patches
        for key in batch:
            del self._waiting[key]
        return batch

    def _output(self, key: Key, picture: Prepared, embeddings: Tensor | Exception) -> StepOutput:
        if isinstance(embeddings, Exception):
            check_device(embeddings)
            return StepOutput(key, model_error(embeddings, "the picture is not encoded"))
        wanted = sum(map(picture.ids.count, self.family.placeholders.values()))
        if embeddings.shape[1] != wanted:
            problem = f"the model made {embeddings.shape[1]} embeddings for {wanted} placeholders"
            return StepOutput(key, InternalError(problem))
        if not embeddings.isfinite().all():
            return StepOutput(
                key, InternalError("the model computed NaN or infinity for this picture")
            )
        return StepOutput(key, embeddings)

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the number of waiting pictures."""
        return {**self._counts, "waiting": len(self._waiting)}
