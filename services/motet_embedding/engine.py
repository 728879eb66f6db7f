"""Run the embedding engine: texts of many requests in, vectors out, one forward pass per step.

engine = Engine(config, Encoder.load(config))
engine.add("a", [Text([101, 7592, 102])])
while engine.has_work:
    for output in engine.step():
        print(output.key, output.places, output.vectors)

Requests are added and cancelled between steps, by the thread that steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from motet_kernels.runtime.device import Download
from motet_kernels.runtime.missing_memory import check_device
from motet_shared.errors import InternalError, MotetError, Overloaded, model_error
from motet_shared.process.batch_isolation import computed

from .config import EngineConfig
from .request_queues import Key, RequestQueues, cost
from .texts import Item

Vectors = NDArray[np.float32]


@dataclass(slots=True)
class StepOutput:
    """Report vectors of some texts of one request, or its error.

    places: indices of these texts within the request.
    vectors: `[R, V]` of each of these texts, with R = 1 unless a text has several.
    """

    key: Key
    places: list[int]
    vectors: list[Vectors]
    error: MotetError | None = None


class TextModel(Protocol):
    """Compute what a request wants of its texts: vectors, or scores as vectors of one number.

    packed: whether a pass has no padding.
    """

    packed: bool

    def encode(self, texts: Sequence[Any]) -> Tensor:
        """Return `[R, V]` float32: `Text.vectors` rows for each text, in order."""
        ...

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        ...


class Engine:
    """Compute the texts of all requests with one model."""

    def __init__(self, config: EngineConfig, encoder: TextModel):
        self.config = config
        self.encoder = encoder
        self._queues = RequestQueues()
        self._steps = self._texts = self._tokens = self._computed = 0

    def add(self, key: Key, texts: Sequence[Item], priority: int = 0) -> None:
        """Queue the texts of a request, at least one. Raises Overloaded if they do not all fit."""
        if not texts or key in self._queues:
            raise InternalError(f"key: request {key!r} has no texts, or its key is in use")
        if len(self._queues) + len(texts) > self.config.max_waiting:
            raise Overloaded(
                f"{len(self._queues)} texts wait and {len(texts)} more would exceed max_waiting="
                f"{self.config.max_waiting}; try again in a moment"
            )
        self._queues.add(key, texts, priority)

    def cancel(self, key: Key) -> None:
        """Drop a request. Unknown keys are ignored: those have been served."""
        self._queues.cancel(key)

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something."""
        return bool(len(self._queues))

    def step(self) -> list[StepOutput]:
        """Run one forward pass; return its vectors by request, empty without work.

        A request of which a text cannot be computed ends with an error; the others go on.
        """
        taken = self._queues.take(self.config.max_batch_tokens, packed=self.encoder.packed)
        if not taken:
            return []
        vectors = computed(self._encode, [one.text for one in taken])
        lengths = [len(one.text) for one in taken]
        self._steps += 1
        self._texts += len(taken)
        self._tokens += sum(lengths)
        self._computed += cost(lengths, packed=self.encoder.packed)
        outputs: dict[Key, StepOutput] = {}
        for one, found in zip(taken, vectors, strict=True):
            output = outputs.setdefault(one.key, StepOutput(one.key, [], []))
            if not isinstance(found, Exception) and not np.isfinite(found).all():
                found = InternalError("the model computed NaN or infinity for a text")
            if isinstance(found, Exception):
                output.error = _failure(found)
                self._queues.cancel(one.key)
            else:
                output.places.append(one.place)
                output.vectors.append(found)
        return [*outputs.values()]

    def _encode(self, texts: Sequence[Item]) -> list[Vectors]:
        """Return the vectors of each text."""
        vectors_RV: Vectors = Download(self.encoder.encode(texts)).wait().numpy()
        return np.split(vectors_RV, np.cumsum([text.vectors for text in texts])[:-1])

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the number of waiting texts."""
        return {
            "waiting": len(self._queues),
            "steps": self._steps,
            "texts": self._texts,
            "tokens": self._tokens,
            "padding": self._computed - self._tokens,
        }


def _failure(error: Exception) -> MotetError:
    check_device(error)
    return error if isinstance(error, MotetError) else model_error(error, "a text has no vectors")
