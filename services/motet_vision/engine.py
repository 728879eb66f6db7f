"""Pictures in, embeddings out, as many at a time as a budget of patches allows. It knows no threads and no network."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from motet_shared.errors import BadRequest, InternalError, MotetError

from .families import Family, Prepared

Key = Hashable


@dataclass(slots=True)
class StepOutput:
    """One picture: embeddings `[L, T, X]`, or why there are none."""

    key: Key
    result: Tensor | MotetError


class Engine:
    """First come, first served; who is alike goes along. `add` and `cancel` are called between steps."""

    def __init__(self, family: Family, max_patches: int):
        self.family = family
        self._max_patches = max_patches
        self._waiting: dict[Key, Prepared] = {}
        self._counts = {"steps": 0, "pictures": 0, "patches": 0, "batch_size": 0}

    def add(self, key: Key, picture: Prepared) -> None:
        if key in self._waiting:
            raise BadRequest(f"picture {key!r} waits already")
        self._waiting[key] = picture

    def cancel(self, key: Key) -> None:
        self._waiting.pop(key, None)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[StepOutput]:
        """Encode the next batch. A picture that spoils it fails alone."""
        batch = self._batch()
        if not batch:
            return []
        self._counts["steps"] += 1
        self._counts["pictures"] += len(batch)
        self._counts["patches"] += sum(picture.patches for picture in batch.values())
        self._counts["batch_size"] = len(batch)
        try:
            return self._encode(batch)
        except Exception:  # whatever model code raises; who it was about shows when each is alone
            return [self._encode_alone(key, picture) for key, picture in batch.items()]

    def _encode_alone(self, key: Key, picture: Prepared) -> StepOutput:
        try:
            return self._encode({key: picture})[0]
        except Exception as error:
            problem = f"the picture cannot be encoded: {type(error).__name__}: {error}"
            return StepOutput(key, InternalError(problem))

    def _batch(self) -> dict[Key, Prepared]:
        """The first that waits, and those like it as far as the patches go."""
        batch: dict[Key, Prepared] = {}
        left, alike = self._max_patches, None
        for key, picture in self._waiting.items():
            if batch and (picture.alike != alike or picture.patches > left):
                continue
            batch[key], alike = picture, picture.alike
            left -= picture.patches
        for key in batch:
            del self._waiting[key]
        return batch

    def _encode(self, batch: dict[Key, Prepared]) -> list[StepOutput]:
        found = self.family.encode(list(batch.values()))
        return [self._checked(*each) for each in zip(batch, batch.values(), found, strict=True)]

    def _checked(self, key: Key, picture: Prepared, embeddings: Tensor) -> StepOutput:
        wanted = picture.ids.count(self.family.placeholder)
        if embeddings.shape[1] != wanted:
            problem = f"the picture has {embeddings.shape[1]} embeddings for {wanted} placeholders"
            return StepOutput(key, InternalError(problem))
        if not embeddings.isfinite().all():
            return StepOutput(key, InternalError("the model computed NaN or infinity for this picture"))
        return StepOutput(key, embeddings)

    def stats(self) -> dict[str, float]:
        return {**self._counts, "waiting": len(self._waiting)}
