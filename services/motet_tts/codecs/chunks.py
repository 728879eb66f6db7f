"""Decode the frames of sentences in chunks that begin small; chunks of equal length together.

Where chunks begin and end depends on the number of frames alone, however many wait: a convolution
over another number of frames is rounded differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from motet_kernels.runtime.device import Download
from motet_shared.process.batch_isolation import computed
from motet_tts.engine.failures import failure
from motet_tts.engine.utterance import Key, StepOutput

from .codec import Codec, State, on_host


class Framed(Protocol):
    """Define what a sentence tells of its frames.

    key: of the sentence.
    codec: the decoder's state.
    waiting: frames that are not decoded yet.
    decoded: number of frames that are.
    done: whether no frame follows.
    """

    key: Key
    codec: State
    waiting: list[Tensor]
    decoded: int
    done: bool


Sentence = TypeVar("Sentence", bound=Framed)


class ChunkDecoder:
    """Decode the frames of sentences when enough of them wait.

    first_chunk: seconds of speech in the first chunk of a sentence, at least one frame: less
        reduces latency.
    chunk: seconds of speech that the codec decodes at a time later on: more costs less. It is at
        least as much as the codec computes again around it.
    """

    def __init__(self, codec: Codec, device: torch.device, *, first_chunk: float, chunk: float):
        frame_seconds = codec.frame_samples / codec.sample_rate
        self._codec, self._device = codec, device
        self._first = max(1, math.ceil(first_chunk / frame_seconds - 1e-6))
        self._chunk = max(self._first, round(chunk / frame_seconds), codec.context)

    def is_due(self, sentence: Framed) -> bool:
        """Return True if the chunk of a sentence is full, or its last one."""
        return sentence.done or len(sentence.waiting) >= self._full(sentence)

    def _full(self, sentence: Framed) -> int:
        """Return the number of frames of a sentence's next chunk, unless it is the last one."""
        return min(self._chunk, max(self._first, sentence.decoded))

    def _due(self, sentence: Framed) -> int:
        """Return the number of frames to decode now, of a sentence whose chunk is due."""
        return min(len(sentence.waiting), self._full(sentence))

    def decode(self, sentences: Iterable[Sentence]) -> list[tuple[Sentence, Tensor | Exception]]:
        """Return the samples of each sentence whose chunk is due, on the CPU, or why it failed.

        The caller passes samples to `finish`.
        """
        due_by_length: dict[int, list[Sentence]] = {}
        for sentence in sentences:
            if self.is_due(sentence):
                due_by_length.setdefault(self._due(sentence), []).append(sentence)
        rows = [sentence for group in due_by_length.values() for sentence in group]
        chunks = [
            chunk
            for count, group in due_by_length.items()
            for chunk in computed(partial(self._chunks, count), group)
        ]
        return list(zip(rows, on_host(chunks), strict=True))

    def outputs(
        self, sentences: Iterable[Sentence], output: Callable[[Sentence, Tensor, bool], StepOutput]
    ) -> list[StepOutput]:
        """Return an output of each sentence whose chunk is due, with the error of one that failed.

        output: makes it of the samples, once these are recorded as decoded, and whether they are the last.
        """
        found = []
        for sentence, chunk in self.decode(sentences):
            try:
                if isinstance(chunk, Exception):
                    raise chunk
                samples = self.finish(sentence, chunk)
                found.append(output(sentence, samples, _is_complete(sentence)))
            except Exception as error:
                found.append(StepOutput(sentence.key, error=failure(error, self._device)))
        return found

    def _chunks(self, count: int, sentences: Sequence[Framed]) -> list[Tensor]:
        if not count:
            return [torch.zeros(0, device=self._device) for _ in sentences]
        frames_BN = torch.stack([torch.stack(one.waiting[:count]) for one in sentences])
        return self._codec.decode([sentence.codec for sentence in sentences], frames_BN)

    def finish(self, sentence: Framed, samples: Tensor) -> Tensor:
        """Record that a chunk is decoded; return the samples with those due at the end."""
        count = self._due(sentence)
        sentence.decoded += count
        sentence.waiting = sentence.waiting[count:]
        if _is_complete(sentence) and (tail := self._codec.finish(sentence.codec)) is not None:
            return torch.cat([samples, Download(tail).wait()])
        return samples


def _is_complete(sentence: Framed) -> bool:
    """Return True if all frames of a sentence are decoded."""
    return sentence.done and not sentence.waiting
