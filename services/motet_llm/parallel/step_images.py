"""Carry the pictures of a step to the ranks: what the model reads of a request's image embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from motet_llm.models.image_embeddings import ImageEmbeddings


class PackedImages(Struct, array_like=True, frozen=True):
    """Hold the image embeddings among the tokens of one work.

    places: of the placeholders, from the work's first token on, int64. embeddings: `[L, n, X]` of
        shape `shape` and type `dtype`. positions: `[3, N]` of the work's tokens, int64. wholes:
        first token and end of pictures whose tokens see all of them.
    """

    places: bytes
    embeddings: bytes
    shape: tuple[int, ...]
    dtype: str
    positions: bytes
    wholes: list[tuple[int, int]]

    @classmethod
    def of(cls, images: ImageEmbeddings | None, start: int, stop: int) -> PackedImages | None:
        """Return what tokens `start` to `stop` show of a request's images; None without any."""
        if images is None:
            return None
        places, shown_LTX = images.between(start, stop)
        return cls(
            places=np.ascontiguousarray(places, np.int64).tobytes(),
            embeddings=shown_LTX.contiguous().view(torch.uint8).numpy().tobytes(),
            shape=tuple(shown_LTX.shape),
            dtype=str(shown_LTX.dtype).removeprefix("torch."),
            positions=np.ascontiguousarray(images.positions(start, stop), np.int64).tobytes(),
            wholes=images.wholes(start, stop),
        )


@dataclass(slots=True, frozen=True)
class StepImages:
    """Stand for the `ImageEmbeddings` of a request on a rank that does not schedule, in one step."""

    packed: PackedImages

    def between(self, _start: int, _stop: int) -> tuple[np.ndarray, Tensor]:
        """Return the placeholders of the step's tokens, and their embeddings."""
        packed, dtype = self.packed, getattr(torch, self.packed.dtype)
        if not packed.embeddings:
            return np.empty(0, np.int64), torch.empty(packed.shape, dtype=dtype)
        shown = torch.frombuffer(bytearray(packed.embeddings), dtype=dtype)
        return np.frombuffer(packed.places, np.int64), shown.view(packed.shape)

    def positions(self, _start: int, _stop: int) -> np.ndarray:
        """Return positions `[3, N]` of the step's tokens."""
        return np.frombuffer(self.packed.positions, np.int64).reshape(3, -1)

    def wholes(self, _start: int, _stop: int) -> list[tuple[int, int]]:
        """Return the pictures among the step's tokens that see all of themselves."""
        return self.packed.wholes
