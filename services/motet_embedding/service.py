"""Serve role `embedding`: operation `embed`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np

from motet_models.checkpoints.summary import summarize
from motet_shared.errors import BadRequest
from motet_shared.messages import Embed, Usage, Vectors
from motet_shared.process.actor import operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .actor import TextActor
from .config import EmbeddingConfig, EngineConfig
from .encoder import Encoder
from .folder import Folder
from .late_interaction import TokenEncoder
from .picture_reader import PictureReader
from .pictures import PictureEncoder
from .texts import Item, Texts

Embedder = Encoder | TokenEncoder | PictureEncoder

_MAX_ITEM_BYTES = (
    256 * 1024
)  # most bytes of vectors in one item: a message stays far below `max_payload`


class Embedding(TextActor):
    """Serve one embedding model: texts or pictures in, vectors out."""

    role = "embedding"

    def __init__(self, config: EmbeddingConfig, bus: Bus):
        super().__init__(config, bus)
        self._texts: Texts | None = None
        self._model: Embedder | None = None
        self._pictures = PictureReader(config, bus)

    async def warm(self) -> None:
        config = self.config.engine()
        model = self._model = await asyncio.to_thread(load_embedder, config)
        self._texts = Texts(model.folder, model.limit, model.vocabulary)
        await self._pictures.start()
        self.serve(
            config,
            model,
            model.folder,
            context=model.limit,
            vocab_size=model.vocabulary,
            multi_vector=isinstance(model, TokenEncoder),
            images=isinstance(model, PictureEncoder),
            **summarize(model.folder.transformer),
        )

    async def close(self) -> None:
        await super().close()
        await self._pictures.close()

    @property
    def model(self) -> Embedder:
        """Return the model. Raises RuntimeError before `warm` has loaded it."""
        if self._model is None:
            raise RuntimeError("the model is not loaded yet")
        return self._model

    @operation(Embed)
    async def embed(self, call: Call, request: Embed) -> None:
        """Send `Vectors` of all texts, in order, as they are computed."""
        self.check_served(request.model)
        size = self._size(request.dimensions)
        texts = await self._read(request)
        done, several = 0, isinstance(self.model, TokenEncoder)
        most = max(1, _MAX_ITEM_BYTES // (4 * size))
        async with (
            self.sessions.submitting(texts, request.priority) as pending,
            aclosing(pending.read(1 if several else most)) as ready,
        ):
            async for vectors in ready:
                rows = _truncate(np.concatenate(vectors), size)
                tokens = sum(map(len, texts[done : done + len(vectors)]))
                done += len(vectors)
                for item in _items(rows, len(vectors), tokens, most if several else 0):
                    await call.send(item)
        call.finish("stop", Usage(prompt_tokens=sum(map(len, texts))))

    def _size(self, dimensions: int) -> int:
        """Return the requested vector size; 0 requests all. Raises BadRequest if out of bounds."""
        whole = self.model.size
        if not 0 <= dimensions <= whole:
            message = (
                f"dimensions: {dimensions}; this model's vectors have {whole}, give 1 to {whole}"
            )
            raise BadRequest(message, param="dimensions")
        return dimensions or whole

    async def _read(self, request: Embed) -> list[Item]:
        """Return the texts and pictures of a request, ready to be encoded."""
        if self._texts is None:
            raise RuntimeError("the model is not loaded yet")
        count, most = len(request.input) + len(request.pictures), self.config.max_waiting
        if not 1 <= count <= most:
            raise BadRequest(f"input: has {count} texts; give 1 to {most}", param="input")
        read = self.model.texts.read if isinstance(self.model, TokenEncoder) else self._texts.read
        texts = await asyncio.to_thread(read, request.input, request.prompt, request.first)
        queued = int(self.sessions.thread.stats()["waiting"])
        return [*texts, *await self._pictures.read(request.pictures, self.model, queued)]


def load_embedder(config: EngineConfig) -> Embedder:
    """Load a model of vectors of the kind that its folder says. Raises ConfigError."""
    folder = Folder.read(config.model)
    if folder.kind == "picture vectors":
        return PictureEncoder.load(folder, config)
    late = folder.kind == "token vectors"
    return TokenEncoder.load(folder, config) if late else Encoder.load(config)


def _items(
    rows: np.ndarray[Any, np.dtype[np.float32]], count: int, tokens: int, most: int
) -> list[Vectors]:
    """Return vectors as one item; a text's `most` at a time if it has several."""
    data = rows.astype("<f4")
    if not most:
        return [Vectors(data.tobytes(), count, tokens)]
    size = rows.shape[1]
    pieces = [data[at : at + most].tobytes() for at in range(0, len(data), most)] or [b""]
    return [
        *(Vectors(piece, 0, 0, size) for piece in pieces[:-1]),
        Vectors(pieces[-1], count, tokens, size),
    ]


def _truncate(
    vectors_BV: np.ndarray[Any, np.dtype[np.float32]], size: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the first `size` numbers of each vector at unit length; whole vectors unchanged."""
    if size == vectors_BV.shape[1]:
        return vectors_BV
    cut = vectors_BV[:, :size]
    values: np.ndarray[Any, np.dtype[np.float32]] = cut / np.maximum(
        np.linalg.norm(cut, axis=1, keepdims=True), np.finfo(np.float32).tiny
    )
    return values
