"""Run the speech engine: sentences in, samples out, many at a time; no network, one thread.

engine = Engine(EngineConfig(model="models/pocket-tts"))
engine.add("a", Utterance(words=("hello", "there"), voice=engine.voices[0]))
while engine.has_work:
    for piece in engine.step():
        play(piece.samples)
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from pathlib import Path

import torch

from motet_kernels.runtime.device import describe, dtype_name
from motet_shared.errors import BadRequest, MotetError, Overloaded
from motet_tts.checkpoint import SpeechModel, load
from motet_tts.config import EngineConfig

from .utterance import Key, Piece, Utterance

log = logging.getLogger(__name__)


_SMALL = 256 << 20  # bytes of weights


class Engine:
    """Synthesize with one model; sentences join and leave between steps, independent of others."""

    def __init__(self, config: EngineConfig):
        if threads := config.threads or (1 if _is_small(config) else 0):
            torch.set_num_threads(threads)
        self.config = config
        self.model: SpeechModel = load(config)
        self._waiting: OrderedDict[Key, Utterance] = OrderedDict()
        self._running: set[Key] = set()
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0

    @property
    def voices(self) -> tuple[str, ...]:
        return self.model.voices

    @property
    def sample_rate(self) -> int:
        return self.model.sample_rate

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, key: Key, utterance: Utterance) -> None:
        """Queue a sentence.

        Raises BadRequest for an unknown voice, Overloaded if the queue is full, ValueError if the
        key is in use.
        """
        if key in self._waiting or key in self._running:
            raise ValueError(f"{key!r} is spoken already")
        if utterance.voice not in self.voices:
            raise BadRequest(
                f"voice: {utterance.voice!r} is none of this model's ({', '.join(self.voices)})",
                param="voice",
            )
        if len(self._waiting) >= self.config.max_waiting + self.config.max_running:
            raise Overloaded(f"{len(self._waiting)} sentences wait already (max_waiting)")
        self._waiting[key] = utterance

    def cancel(self, key: Key) -> None:
        """Drop a sentence at once: it is not part of the next step. Unknown keys are ignored."""
        self._waiting.pop(key, None)
        if key in self._running:
            self._running.discard(key)
            self.model.remove(key)

    def step(self) -> list[Piece]:
        """Advance all running sentences by one step; return at most one piece per sentence."""
        began = time.perf_counter()
        pieces = self._admit()
        if self._running:
            pieces += self.model.step()
            self.steps += 1
        for piece in pieces:
            if piece.done or piece.error is not None:
                self._running.discard(piece.key)
            if piece.samples is not None:
                self.samples += len(piece.samples)
        self.seconds += time.perf_counter() - began
        return pieces

    def _admit(self) -> list[Piece]:
        """Admit waiting sentences in order; return the model's refusals as pieces with an error."""
        refused = []
        while self._waiting and len(self._running) < self.config.max_running:
            key, utterance = self._waiting.popitem(last=False)
            try:
                self.model.add(key, utterance)
            except MotetError as error:
                refused.append(Piece(key, error=error))
            else:
                self._running.add(key)
        return refused

    def stats(self) -> dict[str, float]:
        spoken = self.samples / self.sample_rate
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "steps": self.steps,
            "speech_seconds": round(spoken, 3),
            "busy_seconds": round(self.seconds, 3),
        }

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return {"dtype": dtype_name(self.model.dtype), **describe(self.model.device)}

    def check_integrity(self) -> None:
        """Raise RuntimeError if the model's sentences are not those that the engine runs."""
        if len(self.model) != len(self._running):
            raise RuntimeError(
                f"the engine runs {len(self._running)} sentences, its model {len(self.model)}"
            )
        self.model.check_integrity()


def _is_small(config: EngineConfig) -> bool:
    """Return True if one thread is best: layers finish before a second thread could synchronize."""
    return sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors")) < _SMALL
