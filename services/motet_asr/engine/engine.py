"""Define the engine and model family interfaces: audio windows in, decoded results out.

Windows join at any time and every step serves all that are present. `add` and `cancel` are called
between steps, by the thread that steps; after its `StepOutput` a window is gone and its key may be
reused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_kernels.runtime.device import describe, dtype_name
from motet_kernels.runtime.missing_memory import check_device, is_out_of_memory
from motet_shared.errors import (
    BadRequest,
    InternalError,
    MotetError,
    Overloaded,
    StreamBroken,
    UnsupportedParameter,
    model_error,
)

from .audio_stream import AudioStream, StreamChunk
from .request import Key, StepOutput, TimedSegment, TranscriptionOptions, WindowResult

SAMPLE_RATE = 16_000
Audio = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True, eq=False)
class WaitingWindow:
    """Hold a window that has not been encoded yet.

    features: as prepared by its family, or a `StreamChunk`.
    """

    key: Key
    options: TranscriptionOptions
    features: Any
    seconds: float


@dataclass(slots=True)
class EngineCounts:
    """Count what an engine has computed since its start."""

    steps: int = 0
    encoded: int = 0
    tokens: int = 0
    audio_seconds: float = 0.0
    fallbacks: int = 0
    batch_size: int = 0


class RecognizerFamily(ABC):
    """Adapt a kind of model to the engines, without its scheduling.

    window: longest audio at a time, in seconds.
    vocab: number of token ids.
    device, dtype: where and in which type the model computes.
    translates: whether task `translate` is supported.
    prompts: whether it can continue from a text given as prompt.
    languages: codes that may be requested; empty: none.
    detects: whether it finds the language by itself.
    needs_language: whether it must be told the language.
    word_times: what times words: "frames" that tokens belong to, or "attention"; empty: nothing
        does, and times of words are refused.
    streams: whether live audio is heard chunk by chunk, each once: `open_stream`.
    stream_rate: samples per second that such a stream is fed with.
    """

    device: torch.device
    dtype: torch.dtype
    window: float
    vocab: int
    translates = False
    prompts = False
    languages: frozenset[str] = frozenset()
    detects = False
    needs_language = False
    word_times = ""
    streams = False
    stream_rate = SAMPLE_RATE

    @abstractmethod
    def features(self, audio: Audio) -> Tensor:
        """Compute the encoder's input from at most `window` seconds of audio. Thread-safe."""

    @abstractmethod
    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        """Return the segments of a result, in order, with seconds from the window's start.

        seconds: length of the window.
        words: whether to time each word.
        Thread-safe.
        """

    @abstractmethod
    def text_of(self, tokens: list[int]) -> str:
        """Return the text of tokens of a segment, without special ones. Thread-safe."""

    def open_stream(self) -> AudioStream:
        """Begin a live stream. Raises InternalError if the model does not stream."""
        raise InternalError(f"{type(self).__name__} hears windows only")

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded, such as dtype and device."""
        return {"dtype": dtype_name(self.dtype), **describe(self.device)}

    def check_words(self) -> None:
        """Raise UnsupportedParameter if nothing times the words of this model."""
        if not self.word_times:
            raise UnsupportedParameter(
                "timestamp_granularities: this model does not say when words are spoken, which "
                "`diarized_json` needs too; leave `word` out, or choose a model with word times "
                "(docs/recognizers.md)",
                param="timestamp_granularities",
            )

    def code(self, language: str) -> str:
        """Return the code of a language given by code or name; unchanged if it is neither."""
        return language.strip().lower()

    def language_name(self, code: str) -> str:
        """Return the English name of a language code; unchanged if it is unknown."""
        return code

    def check(self, options: TranscriptionOptions) -> None:
        """Raise BadRequest or UnsupportedParameter for options that the model does not support."""
        if options.task == "translate" and not self.translates:
            raise BadRequest(
                "task: 'translate' needs a model that translates; leave it out, or choose one (docs/recognizers.md)",
                param="task",
            )
        if options.prompt.strip() and not self.prompts:
            raise UnsupportedParameter(
                "`prompt`: this model cannot continue a given text; leave it out", param="prompt"
            )
        if self.needs_language and not options.language:
            known = ", ".join(sorted(self.languages))
            raise BadRequest(
                f"language: this model does not detect what is spoken; give one of {known}",
                param="language",
            )
        if options.language and self.languages and options.language not in self.languages:
            known = ", ".join(sorted(self.languages))
            raise BadRequest(
                f"language: {options.language!r} is not supported by this model; give one of {known}",
                param="language",
            )


class Engine(ABC):
    """Queue windows and collect outputs; base class of the engines.

    decoding: how tokens are found, in a word for people.
    """

    decoding: str

    def __init__(self, config: EngineConfig, family: RecognizerFamily):
        self.config = config
        self.family = family
        self.counts = EngineCounts()
        self._waiting: list[WaitingWindow] = []
        self._taken: dict[Key, WaitingWindow] = {}
        self._parts: list[list[WaitingWindow]] = []  # of failed steps, the next one last
        self._pending: list[StepOutput] = []

    def prepare(self, audio: Audio) -> Tensor:
        """Compute a window's features for `add`. Thread-safe. Raises BadRequest if too long."""
        seconds = len(audio) / SAMPLE_RATE
        if seconds > self.family.window + 1e-6:
            raise BadRequest(
                f"audio: a window of {seconds:.2f} s; give at most {self.family.window:g} s",
                param="audio",
            )
        with torch.inference_mode():
            return self.family.features(audio)

    def add(self, key: Key, features: Any, seconds: float, options: TranscriptionOptions) -> None:
        """Queue a window. Raises BadRequest, or Overloaded when the queue is full."""
        self.family.check(options)
        if self.holds(key):
            raise BadRequest(
                f"key: window {key!r} is being transcribed already; give it another key",
                param="key",
            )
        if len(self._waiting) >= self.config.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} windows are waiting (max_waiting); try again later"
            )
        self._waiting.append(WaitingWindow(key, options, features, seconds))

    def cancel(self, key: Key) -> None:
        """Drop a window and free its resources at once; unknown keys are ignored."""
        self._taken.pop(key, None)
        for queue in (self._waiting, *self._parts):
            queue[:] = [waiting for waiting in queue if waiting.key != key]

    def holds(self, key: Key) -> bool:
        """Return True if a window of this key has not ended yet."""
        queues = (self._taken.values(), self._waiting, *self._parts)
        return any(waiting.key == key for queue in queues for waiting in queue)

    @property
    def has_work(self) -> bool:
        """Return True if `step` would do something."""
        return bool(self._waiting or self._taken or self._pending or any(self._parts))

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Encode one batch, decode one step and return the windows that ended, possibly none.

        The windows of a step that raises begin again, half of them at a time, until the one that
        fails it is alone: it ends with an error.
        """
        self.counts.steps += 1
        try:
            self._step()
        except Exception as error:
            self._divide(error)
        outputs, self._pending = self._pending, []
        return outputs

    @abstractmethod
    def _step(self) -> None: ...

    @abstractmethod
    def _drop(self) -> None:
        """Forget all windows that are being decoded, and whatever a failed step left of them."""

    def _divide(self, error: Exception) -> None:
        """Have the windows of a failed step computed in parts; raise `error` if it cannot be.

        A chunk changes its live stream, so it is not computed again: the stream moves.
        """
        windows, self._taken = [*self._taken.values()], {}
        if not windows or not (is_out_of_memory(error) or self.family.device.type == "cpu"):
            raise error
        self._drop()
        if len(windows) == 1:
            self._end(windows[0].key, error=failure(error))
            return
        whole = [one for one in windows if not isinstance(one.features, StreamChunk)]
        for one in windows:
            if isinstance(one.features, StreamChunk):
                self._end(one.key, error=StreamBroken("a step failed: its live streams move"))
        half = len(whole) // 2
        self._parts += [part for part in (whole[half:], whole[:half]) if part]

    def _take(self, room: int) -> list[WaitingWindow]:
        """Remove the next windows to encode together from the queue.

        After a failed step these are its parts, each alone.
        """
        while self._parts and not self._parts[-1] and not self._taken:
            self._parts.pop()
        queue, count = self._parts[-1] if self._parts else self._waiting, self.config.encode_batch
        taken = queue[: min(room, count)]
        del queue[: len(taken)]
        self._taken |= {waiting.key: waiting for waiting in taken}
        return taken

    def _end(
        self, key: Key, result: WindowResult | None = None, error: MotetError | None = None
    ) -> None:
        self._taken.pop(key, None)
        self._pending.append(StepOutput(key, result, error))

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the current state."""
        return {
            "waiting": len(self._waiting) + sum(map(len, self._parts)),
            "running": 0,
            "steps": self.counts.steps,
            "windows_encoded": self.counts.encoded,
            "tokens": self.counts.tokens,
            "audio_seconds": self.counts.audio_seconds,
            "fallbacks": self.counts.fallbacks,
            "batch_size": self.counts.batch_size,
        }

    def check_integrity(self) -> None:
        """Raise InternalError if the engine's records are inconsistent."""
        keys = [waiting.key for waiting in self._waiting]
        if len(set(keys)) != len(keys):
            raise InternalError("a window is queued twice")


def failure(error: Exception) -> MotetError:
    """Return the error of a window that fails although it is computed alone.

    Raises an error of a GPU that leaves the process without its use.
    """
    check_device(error)
    if is_out_of_memory(error):
        return Overloaded(
            "memory: the audio does not fit beside what is in use; try again later, or with less"
        )
    if isinstance(error, MotetError):
        return error
    return model_error(error, "the audio is not transcribed")
