"""Engines: windows of audio go in at any time, text comes out, and each step serves all that are there.

`Engine` is what every model family looks like from outside. `add` and `cancel` are called between steps, by the thread
that steps; after its `StepOutput` a window is gone, and its key may be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet_kernels.device import describe, dtype_name
from motet_shared.errors import BadRequest, InternalError, MotetError, Overloaded

from .config import EngineConfig
from .request import Heard, Key, Options, Piece, StepOutput

SAMPLE_RATE = 16_000
Audio = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True, eq=False)
class Waiting:
    """A window that has not been encoded yet. `features`: as its family prepared them."""

    key: Key
    options: Options
    features: Tensor
    seconds: float


@dataclass(slots=True)
class Counts:
    steps: int = 0
    encoded: int = 0
    tokens: int = 0
    audio_seconds: float = 0.0
    fallbacks: int = 0
    batch_size: int = 0


class Family(ABC):
    """What a kind of model can do, apart from when. `window`: the longest audio at a time, seconds.

    device, dtype: where and in which type it computes.
    """

    device: torch.device
    dtype: torch.dtype
    window: float
    vocab: int
    translates = False
    languages: frozenset[str] = frozenset()  # that it can be told; empty: none

    @abstractmethod
    def features(self, audio: Audio) -> Tensor:
        """What the encoder takes, of audio of at most `window` seconds. Any thread may ask."""

    @abstractmethod
    def pieces(self, heard: Heard, seconds: float, words: bool) -> list[Piece]:
        """Text with times. `seconds`: length of the window. Any thread may ask."""

    def describe(self) -> dict[str, str]:
        """What was chosen when the model was loaded."""
        return {"dtype": dtype_name(self.dtype), **describe(self.device)}

    def code(self, language: str) -> str:
        """The code of a language that is given by code or name; as given if it is neither."""
        return language.strip().lower()

    def language_name(self, code: str) -> str:
        return code

    def check(self, options: Options) -> None:
        """Raises BadRequest for what the model cannot do."""
        if options.task == "translate" and not self.translates:
            raise BadRequest("this model only transcribes; translation needs a multilingual Whisper", param="task")
        if options.language and self.languages and options.language not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise BadRequest(f"language {options.language!r} is not known to this model; it knows {known}")


class Engine(ABC):
    """Base of the engines: the queue, and what there is to say."""

    def __init__(self, config: EngineConfig, family: Family):
        self.config = config
        self.family = family
        self.counts = Counts()
        self._waiting: list[Waiting] = []
        self._pending: list[StepOutput] = []

    def prepare(self, audio: Audio) -> Tensor:
        """Features of a window for `add`, from any thread. BadRequest for audio that is too long."""
        seconds = len(audio) / SAMPLE_RATE
        if seconds > self.family.window + 1e-6:
            raise BadRequest(f"a window has {seconds:.2f} s; the model takes at most {self.family.window:g} s")
        with torch.inference_mode():
            return self.family.features(audio)

    def add(self, key: Key, features: Tensor, seconds: float, options: Options) -> None:
        """Queue a window. Raises BadRequest, or Overloaded when the queue is full."""
        self.family.check(options)
        if self.holds(key):
            raise BadRequest(f"window {key!r} is being heard already")
        if len(self._waiting) >= self.config.max_waiting:
            raise Overloaded(f"{len(self._waiting)} windows are waiting (max_waiting)")
        self._waiting.append(Waiting(key, options, features, seconds))

    def cancel(self, key: Key) -> None:
        """Forget a window and free what it holds, at once. An unknown key is one that has ended: nothing to do."""
        self._waiting = [waiting for waiting in self._waiting if waiting.key != key]

    def holds(self, key: Key) -> bool:
        return any(waiting.key == key for waiting in self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._pending)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One batch of encoding and one step of decoding; the windows that ended. Empty if there was nothing to do."""
        self.counts.steps += 1
        self._step()
        outputs, self._pending = self._pending, []
        return outputs

    @abstractmethod
    def _step(self) -> None: ...

    def _take(self, room: int) -> list[Waiting]:
        """The next windows to encode together."""
        count = min(room, self.config.encode_batch)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _end(self, key: Key, heard: Heard | None = None, error: MotetError | None = None) -> None:
        self._pending.append(StepOutput(key, heard, error))

    def stats(self) -> dict[str, float]:
        return {
            "waiting": len(self._waiting),
            "running": 0,
            "steps": self.counts.steps,
            "windows_encoded": self.counts.encoded,
            "tokens": self.counts.tokens,
            "audio_seconds": self.counts.audio_seconds,
            "fallbacks": self.counts.fallbacks,
            "batch_size": self.counts.batch_size,
        }

    def check_integrity(self) -> None:
        """Raise InternalError if what is listed and what is held disagree."""
        keys = [waiting.key for waiting in self._waiting]
        if len(set(keys)) != len(keys):
            raise InternalError("a window waits twice")
