"""Drive a diffusion engine in a test and record its outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.engine import Engine
from motet_diffusion.engine.request import (
    Event,
    FramesDecoded,
    Key,
    PictureDone,
    PictureRequest,
    SoundDecoded,
    StepDone,
)

# Of 255: the order of float additions differs with the company, nothing else, and a value may then round another way.
TOLERANCE = 1
Pixels = NDArray[np.int64]


class RecordingEngine:
    """Drive an engine until all requests are done, and record its outputs."""

    def __init__(self, path: Path, patience: float = 60.0, **options: Any):
        """Start the engine.

        patience: seconds that pictures may take.
        """
        self._patience = patience
        self._queue: SimpleQueue[Event] = SimpleQueue()
        self.events: list[Event] = []
        self.engine = Engine(
            EngineConfig(model=str(path), **{"max_pixels": 1 << 14, **options}), self._queue.put
        )

    def __enter__(self) -> RecordingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.engine.check_integrity()

    def collect(self) -> None:
        while not self._queue.empty():
            self.events.append(self._queue.get())

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._patience
        while not condition():
            assert time.monotonic() < deadline, "the engine does not come to an end"
            self.engine.step()
            self.collect()

    def draw(self, *drawings: PictureRequest) -> list[Pixels]:
        """Generate all requests as one batch."""
        self.events = []
        for number, drawing in enumerate(drawings):
            self.engine.add(number, drawing)
        self.until(lambda: not self.engine.has_work)
        self.collect()
        return [self.picture(number) for number in range(len(drawings))]

    def draw_together(self, *drawings: PictureRequest) -> list[Pixels]:
        """Generate all requests, with the first passes of all before any is computed."""
        self.events = []
        for number, drawing in enumerate(drawings):
            self.engine.add(number, drawing)
        self.engine._admit()
        deadline = time.monotonic() + self._patience
        while len(self.engine.batcher) < len(drawings):
            assert time.monotonic() < deadline, "a picture does not reach its first pass"
            time.sleep(0.001)
        self.until(lambda: not self.engine.has_work)
        self.collect()
        return [self.picture(number) for number in range(len(drawings))]

    def done(self, key: Key) -> PictureDone:
        (found,) = [
            event for event in self.events if isinstance(event, PictureDone) and event.key == key
        ]
        return found

    def picture(self, key: Key) -> Pixels:
        done = self.done(key)
        if done.error is not None:
            raise done.error
        if done.picture is None:
            return np.concatenate(self.frames(key)).astype(np.int64)
        return np.asarray(done.picture).astype(np.int64)

    def frames(self, key: Key) -> list[Any]:
        """Return the frames of a video, in the parts in which they came."""
        return [
            event.frames
            for event in self.events
            if isinstance(event, FramesDecoded) and event.key == key
        ]

    def sound(self, key: Key) -> Any:
        """Return the sound of a video; None if it has none."""
        found = [
            event.samples
            for event in self.events
            if isinstance(event, SoundDecoded) and event.key == key
        ]
        assert len(found) < 2
        return found[0] if found else None

    def steps(self, key: Key) -> list[StepDone]:
        return [event for event in self.events if isinstance(event, StepDone) and event.key == key]


def assert_alike(one: Pixels, other: Pixels) -> None:
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= TOLERANCE
