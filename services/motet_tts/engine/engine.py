"""Run the speech engine: sentences in, samples out, many at a time; no network, one thread.

engine = Engine(EngineConfig(model="models/pocket-tts"))
engine.add("a", Utterance(words=("hello", "there"), voice=engine.voices[0]))
while engine.has_work:
    for output in engine.step():
        play(output.samples)
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from motet_kernels.runtime.device import describe, dtype_name
from motet_shared.errors import BadRequest, Overloaded
from motet_tts.checkpoint import LONG_STEPS, SpeechModel, TokenFed, load, model_type
from motet_tts.config import EngineConfig

from .failures import failure, not_finite
from .utterance import Key, StepOutput, Utterance

log = logging.getLogger(__name__)


_SMALL_MODEL = 256 << 20  # bytes of weights


class Engine:
    """Synthesize with one model; sentences join and leave between steps, independent of others."""

    def __init__(self, config: EngineConfig):
        if threads := config.threads or (1 if _is_small(config) else 0):
            torch.set_num_threads(threads)
        self.config = config
        self.model: SpeechModel = load(config)
        self._waiting: OrderedDict[Key, Utterance] = OrderedDict()
        self._fed: defaultdict[Key, list[tuple[Sequence[int], bool]]] = defaultdict(list)
        self._running: set[Key] = set()
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0

    @property
    def voices(self) -> tuple[str, ...]:
        """Return the names of the model's voices, the default one first."""
        return self.model.voices

    @property
    def sample_rate(self) -> int:
        """Return the sample rate of the outputs, in Hz."""
        return self.model.sample_rate

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something."""
        return self.model.has_work or bool(self._waiting and self._has_room)

    @property
    def _has_room(self) -> bool:
        return len(self._running) < self.config.max_running

    def add(self, key: Key, utterance: Utterance) -> None:
        """Queue a sentence.

        Raises BadRequest for an unknown voice or a sample that the model cannot use, Overloaded if
        the queue is full, ValueError if the key is in use.
        """
        if key in self._waiting or key in self._running:
            raise ValueError(f"key: {key!r} is in use by another sentence")
        if utterance.voice not in self.voices:
            raise BadRequest(
                f"voice: {utterance.voice!r} is unknown; give one of {', '.join(self.voices)}",
                param="voice",
            )
        if utterance.sample is not None and not self.model.clones:
            raise BadRequest(
                f"voice: {self.config.model_name!r} cannot imitate voices; give one of {', '.join(self.voices)}",
                param="voice",
            )
        if len(self._waiting) >= self.config.max_waiting + self.config.max_running:
            raise Overloaded(
                f"{len(self._waiting)} sentences are queued (max_waiting); try again later"
            )
        self._waiting[key] = utterance

    def cancel(self, key: Key) -> None:
        """Drop a sentence at once: it is not part of the next step. Unknown keys are ignored."""
        self._waiting.pop(key, None)
        self._fed.pop(key, None)
        if key in self._running:
            self._running.discard(key)
            self.model.remove(key)

    def feed(self, key: Key, ids: Sequence[int], *, last: bool) -> None:
        """Give a sentence tokens of decode; one that waits has them once it is admitted.

        Unknown keys are ignored.
        """
        if key in self._waiting:
            self._fed[key].append((ids, last))
        elif key in self._running and isinstance(self.model, TokenFed):
            self.model.feed(key, ids, last)

    def step(self) -> list[StepOutput]:
        """Advance all running sentences by one step; return at most one output per sentence.

        A sentence that cannot be computed ends with an error; the others go on.
        """
        began = time.perf_counter()
        outputs = self._admit()
        if self._running:
            outputs += map(self._checked, self.model.step())
            self.steps += 1
        for output in outputs:
            if output.done or output.error is not None:
                self._running.discard(output.key)
            if output.samples is not None:
                self.samples += len(output.samples)
        self.seconds += time.perf_counter() - began
        return outputs

    def _checked(self, output: StepOutput) -> StepOutput:
        """Return the output; in place of samples that are not finite, the end of the sentence."""
        if output.samples is None or output.samples.isfinite().all():
            return output
        self.model.remove(output.key)
        return StepOutput(output.key, error=not_finite())

    def _admit(self) -> list[StepOutput]:
        """Admit waiting sentences, those of the highest priority first, in order.

        Returns what the model refuses, or fails to begin, as outputs with an error.
        """
        outputs = []
        while self._waiting and self._has_room:
            key = max(self._waiting, key=lambda waiting: self._waiting[waiting].priority)
            utterance, fed = self._waiting.pop(key), self._fed.pop(key, [])
            try:
                self.model.add(key, utterance)
            except Exception as error:
                outputs.append(StepOutput(key, error=failure(error, self.model.device)))
            else:
                self._running.add(key)
                for ids, last in fed:
                    self.feed(key, ids, last=last)
        return outputs

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the numbers of running and waiting sentences."""
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
    return model_type(config) not in LONG_STEPS and (
        sum(file.stat().st_size for file in Path(config.model).glob("*.safetensors")) < _SMALL_MODEL
    )
