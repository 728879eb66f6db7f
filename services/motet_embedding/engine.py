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

import numpy as np
from numpy.typing import NDArray

from motet_kernels.runtime.device import Download
from motet_shared.errors import InternalError, MotetError, Overloaded

from .config import EngineConfig
from .encoder import Encoder
from .request_queues import Key, RequestQueues, cost
from .texts import Text

Vectors = NDArray[np.float32]


@dataclass(slots=True)
class StepOutput:
    """Report vectors of some texts of one request (in the rows of `vectors`), or its error.

    places: indices of these texts within the request.
    """

    key: Key
    places: list[int]
    vectors: Vectors
    error: MotetError | None = None


NO_VECTORS: Vectors = np.empty((0, 0), np.float32)


class Engine:
    """Encode the texts of all requests with one encoder."""

    def __init__(self, config: EngineConfig, encoder: Encoder):
        self.config = config
        self.encoder = encoder
        self._queues = RequestQueues()
        self._steps = self._texts = self._tokens = self._computed = 0

    def add(self, key: Key, texts: Sequence[Text], priority: int = 0) -> None:
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
        """Run one forward pass; return its vectors by request, empty without work."""
        taken = self._queues.take(self.config.max_batch_tokens, packed=self.encoder.packed)
        if not taken:
            return []
        vectors_BV: Vectors = (
            Download(self.encoder.encode([one.text for one in taken])).wait().numpy()
        )
        lengths = [len(one.text) for one in taken]
        self._steps += 1
        self._texts += len(taken)
        self._tokens += sum(lengths)
        self._computed += cost(lengths, packed=self.encoder.packed)
        rows: dict[Key, list[int]] = {}
        for row, one in enumerate(taken):
            rows.setdefault(one.key, []).append(row)
        return [
            StepOutput(key, [taken[row].place for row in own_rows], vectors_BV[own_rows])
            for key, own_rows in rows.items()
        ]

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the number of waiting texts."""
        return {
            "waiting": len(self._queues),
            "steps": self._steps,
            "texts": self._texts,
            "tokens": self._tokens,
            "padding": self._computed - self._tokens,
        }
