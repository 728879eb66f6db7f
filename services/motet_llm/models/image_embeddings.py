"""Place image embeddings at the placeholder tokens of a prompt.

A request keeps them until it ends, so that it may be preempted and prefilled again. Shapes: T
placeholders of a prompt, P tokens of it, L layers, X hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet_shared.errors import BadRequest
from motet_shared.text.prefixes import prompt_names

from .language_model import ImageEmbeddingShape

_LONGEST_INTERVAL = 1e6  # positions


@dataclass(frozen=True, slots=True, eq=False)
class ImageEmbedding:
    """Hold the embeddings `[L, T, X]` of one image or video.

    Those of equal `name` are the same.
    grid: frames, rows, columns of tokens.
    interval: positions from one frame to the next.
    """

    embeddings_LTX: Tensor
    name: str
    grid: tuple[int, ...] = ()
    interval: float = 1.0


class ImageEmbeddings:
    """Hold all images of a prompt and their placeholders.

    names: what the prompt's tokens are called in the prefix cache: text tokens by their ids,
    placeholders by image and position in it. No two images share a name, and none has that of a
    token.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        image_embeddings: Sequence[ImageEmbedding],
        shape: ImageEmbeddingShape,
    ):
        """Raise BadRequest for images that do not fit the placeholders in `prompt` or the model."""
        self._shape = shape
        tokens_P = np.asarray(prompt, dtype=np.int64)
        self.places_T = np.flatnonzero(np.isin(tokens_P, shape.placeholders))
        for number, embedding in enumerate(image_embeddings):
            _check(embedding, number, shape)
        sizes = [embedding.embeddings_LTX.shape[1] for embedding in image_embeddings]
        if sum(sizes) != len(self.places_T):
            raise BadRequest(
                f"prompt: has {len(self.places_T)} placeholders for images (token"
                f" {' or '.join(map(str, shape.placeholders))}), "
                f"but the {len(image_embeddings)} images have {sum(sizes)} tokens; give as many",
                param="prompt",
            )
        self.embeddings_LTX = torch.cat(
            [embedding.embeddings_LTX for embedding in image_embeddings], dim=1
        )
        self._parts = list(
            zip(image_embeddings, np.split(self.places_T, np.cumsum(sizes)[:-1]), strict=True)
        )
        for number, (embedding, places) in enumerate(self._parts):
            _check_sense(embedding, number, tokens_P[places], shape)
        self.names = self._names(prompt)
        self._wholes = _runs(self.places_T) if shape.looks_ahead else []
        _check_reach(self._wholes, shape)
        self._positions_3P: np.ndarray | None = None
        self._next = 0  # position of the first token after the prompt
        if shape.axes > 1:
            self._positions_3P, self._next = self._positions(len(prompt))

    def _names(self, prompt: Sequence[int]) -> list[int]:
        pictures = [(embedding.name, len(places)) for embedding, places in self._parts]
        return prompt_names(prompt, self._shape.placeholders, pictures)

    def _positions(self, length: int) -> tuple[np.ndarray, int]:
        """Return positions `[3, P]` of frames, rows and columns, and the next one after the prompt.

        As in transformers' `get_rope_index`: text advances on all axes, an image by its longer
        side, and a frame of a video likewise if text stands between the frames. Sound advances as
        text does.
        """
        positions_3P = np.empty((3, length), dtype=np.int64)
        position = done = 0
        for embedding, places in self._parts:
            for start, stop, grid in _grids(embedding, places) if embedding.grid else ():
                positions_3P[:, done:start] = np.arange(position, position + start - done)
                position += start - done
                axes_3T = np.indices(grid).reshape(3, -1)
                axes_3T[0] = (axes_3T[0] * embedding.interval).astype(np.int64)
                positions_3P[:, start:stop] = position + axes_3T
                last_frame = int(axes_3T[0].max()) if self._shape.counts_frames else 0
                position += max(*grid[1:], last_frame + 1)
                done = stop
        positions_3P[:, done:] = np.arange(position, position + length - done)
        return positions_3P, position + length - done

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return positions `[3, stop - start]` of tokens of prompt and output."""
        if self._positions_3P is None:
            return np.broadcast_to(np.arange(start, stop), (3, stop - start))
        length = self._positions_3P.shape[1]
        after = np.arange(max(start, length), max(stop, length)) + (self._next - length)
        return np.concatenate(
            (self._positions_3P[:, start:stop], np.broadcast_to(after, (3, len(after)))), axis=1
        )

    def uncut(self, start: int, count: int) -> int:
        """Return how many of `count` tokens from `start` on to compute, so that no picture is cut.

        That may be more than `count` if they begin with a picture. Pictures whose tokens see only
        earlier ones may be cut.
        """
        end = start + count
        for first, stop in self._wholes:
            if first < end < stop:
                return first - start if start < first else stop - start
        return count

    def wholes(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return first token and end of each picture with tokens from `start` to `stop`.

        Empty if pictures' tokens see only earlier ones.
        """
        return [whole for whole in self._wholes if whole[0] < stop and start < whole[1]]

    def between(self, start: int, stop: int) -> tuple[np.ndarray, Tensor]:
        """Return the placeholders among tokens `start` to `stop`, and their embeddings.

        Indices are relative to `start`; embeddings are `[L, n, X]` for `n` placeholders.
        """
        first, last = np.searchsorted(self.places_T, (start, stop))
        return self.places_T[first:last] - start, self.embeddings_LTX[:, first:last]


def _grids(
    embedding: ImageEmbedding, places_T: np.ndarray
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return first, end and grid of an image, or of each frame if the frames stand apart.

    Raises BadRequest if the placeholders are neither contiguous nor so by frames.
    """
    runs = _runs(places_T)
    frames, *sides = embedding.grid
    if len(runs) == 1:
        return [(*runs[0], embedding.grid)]
    size = math.prod(sides)
    if len(runs) != frames or any(stop - start != size for start, stop in runs):
        raise BadRequest(
            f"prompt: the placeholders of {embedding.name!r} do not stand together", param="prompt"
        )
    return [(*run, (1, *sides)) for run in runs]


def _runs(places_T: np.ndarray) -> list[tuple[int, int]]:
    """Return first and end of each run of adjacent places."""
    breaks = np.flatnonzero(np.diff(places_T) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places_T, breaks) if len(run)]


def _check_reach(wholes: Sequence[tuple[int, int]], shape: ImageEmbeddingShape) -> None:
    """Raise BadRequest for a picture of which a layer's window would not hold all."""
    longest = max((stop - start for start, stop in wholes), default=0)
    if shape.window is not None and longest > shape.window:
        raise BadRequest(
            f"image_embeddings: a picture has {longest} tokens in a row, more than the window of"
            f" {shape.window}; send a smaller one",
            param="image_embeddings",
        )


def _check(embedding: ImageEmbedding, number: int, shape: ImageEmbeddingShape) -> None:
    where, size = f"image_embeddings[{number}]", tuple(embedding.embeddings_LTX.shape)
    if len(size) != 3 or size[0] != shape.layers or size[2] != shape.hidden or not size[1]:
        raise BadRequest(
            f"{where}.embeddings: is {list(size)}, but this model takes [{shape.layers}, tokens, {shape.hidden}]; "
            "encode images with the same checkpoint",
            param=where,
        )
    if not 0 < embedding.interval < _LONGEST_INTERVAL:
        raise BadRequest(
            f"{where}.interval: is {embedding.interval}; give more than 0", param=where
        )
    if (
        shape.axes > 1
        and (embedding.grid or not shape.flat)
        and (
            len(embedding.grid) != 3
            or min(embedding.grid) < 1
            or np.prod(embedding.grid) != size[1]
        )
    ):
        raise BadRequest(
            f"{where}.grid: is {list(embedding.grid)}; give frames, rows and columns of {size[1]} tokens",
            param=where,
        )


def _check_sense(
    embedding: ImageEmbedding, number: int, tokens_T: np.ndarray, shape: ImageEmbeddingShape
) -> None:
    """Raise BadRequest for a picture at placeholders of sound, or the reverse."""
    if len(set(tokens_T.tolist())) > 1 or (
        shape.axes > 1 and bool(embedding.grid) == (tokens_T[0] in shape.flat)
    ):
        raise BadRequest(
            f"image_embeddings[{number}]: {embedding.name!r} does not fit the placeholders that are"
            " next in the prompt; give pictures and sound in their order there",
            param=f"image_embeddings[{number}]",
        )


def place(
    prompt: Sequence[int],
    image_embeddings: Sequence[ImageEmbedding],
    shape: ImageEmbeddingShape | None,
) -> ImageEmbeddings | None:
    """Return the images of a prompt, None if it has none. Raises BadRequest if they do not fit."""
    if shape is None:
        if image_embeddings:
            raise BadRequest(
                "image_embeddings: this model reads no images; leave them out",
                param="image_embeddings",
            )
        return None
    if not image_embeddings and not any(token in prompt for token in shape.placeholders):
        return None
    return ImageEmbeddings(prompt, image_embeddings, shape)
