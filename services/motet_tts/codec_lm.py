"""Codec language models: a decoder that writes the frames of a codec one after another, many sentences at a time.

`CodecLm` is what a family must say of itself: how a text becomes a prompt, how a hidden state becomes a frame and how a
frame is fed back. `CodecBatch` does the rest for all of them: one slot per sentence, sentences that join and leave
between two frames, one forward pass per frame for all, and the codec's decoder in chunks that begin small.

Shapes: B sentences, P positions of a prompt, E hidden size, N frames, … a frame's own (codebooks, or a latent).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet_shared.errors import BadRequest

from .codec import Codec, State, on_host
from .kv_slots import KvSlots, Part
from .noise import Noise
from .utterance import Key, Piece, Utterance


@dataclass(slots=True)
class Sentence:
    """One utterance that is being spoken; `slot` is its row. `memory` is the family's own."""

    key: Key
    utterance: Utterance
    prompt: Tensor  # [P, E]
    max_frames: int
    tokens: int
    codec: State
    memory: Any = None
    hidden: Tensor | None = None  # [E], what the next frame is drawn from
    frame: Tensor | None = None  # […], the last one
    waiting: list[Tensor] = field(default_factory=list)  # frames that are not yet decoded
    frames: int = 0
    decoded: int = 0
    done: bool = False

    @property
    def noise(self) -> Noise:
        return Noise(self.utterance.seed, self.utterance.index, self.frames)


class CodecLm(ABC):
    """A family of codec language models: one checkpoint of it."""

    codec: Codec
    device: torch.device
    dtype: torch.dtype
    voices: tuple[str, ...]
    rates: tuple[float, float] = (1.0, 1.0)  # the speeds at which it can speak by itself

    @abstractmethod
    def begin(self, key: Key, utterance: Utterance) -> Sentence:
        """The sentence with its prompt embedded. BadRequest if it cannot be spoken."""

    @abstractmethod
    def forward(self, inputs_BQE: Tensor, part: Part) -> Tensor:
        """The hidden states `[B, E]` of the last positions."""

    @abstractmethod
    def draw(self, hidden_BE: Tensor, sentences: list[Sentence]) -> tuple[Tensor, list[bool], list[bool]]:
        """The next frame of each `[B, …]`, whether it is to be heard, and whether it is the last."""

    @abstractmethod
    def embed(self, frames_B: Tensor) -> Tensor:
        """What the next position gets of a frame: `[B, 1, E]`."""

    def shape(self, sentence: Sentence, samples: Tensor) -> Tensor:
        """Samples, on the CPU, as the family's processor leaves them: faded in, say. `sentence.decoded` came before."""
        return samples

    def starts(self, sentence: Sentence) -> tuple[int, ...] | None:
        """The sample at which each word began that has begun so far, if the model knows."""
        return None

    @property
    def frame_seconds(self) -> float:
        return self.codec.frame_samples / self.codec.sample_rate


def room_for(prompt: int, context: int) -> int:
    """Frames that fit into a context of so many positions behind a prompt. BadRequest if there is none."""
    if prompt >= context:
        raise BadRequest(
            f"text: a sentence of {prompt} tokens leaves no room in a context of {context}; use shorter sentences",
            param="input",
        )
    return context - prompt


class CodecBatch:
    """All sentences of one `CodecLm` that run.

    first_chunk: seconds of speech in the first chunk of a sentence, one frame at least: less is sooner.
    chunk: seconds of speech that the codec decodes at a time later on: more is cheaper.
    """

    def __init__(self, family: CodecLm, *, first_chunk: float = 0.06, chunk: float = 0.32):
        self.family = family
        self.sample_rate = family.codec.sample_rate
        self.voices, self.rates = family.voices, family.rates
        self.device, self.dtype = family.device, family.dtype
        self._slots = KvSlots(family.device)
        self._rows: list[Sentence] = []  # in the order of their slots
        self._new: list[Sentence] = []
        self._silent: list[Sentence] = []  # that turned out to have no frames
        self._first = max(1, math.ceil(first_chunk / family.frame_seconds - 1e-6))
        self._chunk = max(self._first, round(chunk / family.frame_seconds))

    def __len__(self) -> int:
        return len(self._rows) + len(self._new)

    def add(self, key: Key, utterance: Utterance) -> None:
        """Have it spoken from the next step on. BadRequest if it cannot be."""
        self._new.append(self.family.begin(key, utterance))

    def remove(self, key: Key) -> None:
        """Forget a sentence; nothing of it comes back. Unknown keys are ignored."""
        self._new = [sentence for sentence in self._new if sentence.key != key]
        for slot, sentence in enumerate(self._rows):
            if sentence.key == key:
                self._leave(slot)
                return

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        """One frame for each sentence; samples for those whose chunk is full."""
        self._advance()
        self._admit()
        self._draw()
        pieces = [*self._decode(), *(Piece(sentence.key, done=True) for sentence in self._silent)]
        self._silent = []
        for slot in reversed(range(len(self._rows))):
            if self._rows[slot].done:
                self._leave(slot)
        return pieces

    def _advance(self) -> None:
        """The hidden states of those that have a frame already, in one pass."""
        if not self._rows:
            return
        frames_B = torch.stack([sentence.frame for sentence in self._rows if sentence.frame is not None])
        part = self._slots.first(len(self._rows))
        hidden_BE = self.family.forward(self.family.embed(frames_B), part)
        part.close()
        for sentence, hidden in zip(self._rows, hidden_BE, strict=True):
            sentence.hidden = hidden

    def _admit(self) -> None:
        """Prompts one by one: they are short, and of different lengths."""
        new, self._new = self._new, []
        for sentence in new:
            if sentence.done:
                self._silent.append(sentence)
                continue
            slot = self._slots.join()
            part = self._slots.one(slot, len(sentence.prompt))
            sentence.hidden = self.family.forward(sentence.prompt[None], part)[0]
            part.close()
            self._rows.append(sentence)

    def _draw(self) -> None:
        if not self._rows:
            return
        hidden_BE = torch.stack([sentence.hidden for sentence in self._rows if sentence.hidden is not None])
        frames_B, heard, last = self.family.draw(hidden_BE, self._rows)
        for row, sentence in enumerate(self._rows):
            sentence.frame = frames_B[row]
            sentence.frames += 1
            if heard[row]:
                sentence.waiting.append(frames_B[row])
            sentence.done = last[row] or sentence.frames >= sentence.max_frames

    def _decode(self) -> list[Piece]:
        """Chunks of equal length are decoded together."""
        due: dict[int, list[Sentence]] = {}
        for sentence in self._rows:
            wanted = min(self._chunk, max(self._first, sentence.decoded))
            if sentence.done or len(sentence.waiting) >= wanted:
                due.setdefault(len(sentence.waiting), []).append(sentence)
        rows = [sentence for sentences in due.values() for sentence in sentences]
        chunks = on_host([chunk for count, sentences in due.items() for chunk in self._chunks(count, sentences)])
        return [self._piece(sentence, chunk) for sentence, chunk in zip(rows, chunks, strict=True)]

    def _chunks(self, count: int, sentences: list[Sentence]) -> list[Tensor]:
        if not count:
            return [torch.zeros(0, device=self.family.device) for _ in sentences]
        frames_BN = torch.stack([torch.stack(sentence.waiting) for sentence in sentences])
        return self.family.codec.decode([sentence.codec for sentence in sentences], frames_BN)

    def _piece(self, sentence: Sentence, chunk: Tensor) -> Piece:
        samples = self.family.shape(sentence, chunk)
        sentence.decoded += len(sentence.waiting)
        sentence.waiting = []
        if sentence.done and (tail := self.family.codec.finish(sentence.codec)) is not None:
            samples = torch.cat([samples, *on_host([tail])])
        starts = self.family.starts(sentence)
        return Piece(sentence.key, samples, starts, sentence.done, sentence.tokens, sentence.frames)

    def _leave(self, slot: int) -> None:
        self._slots.leave(slot)
        last = self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last

    def check_integrity(self) -> None:
        """Raises if rows and slots have come apart."""
        if len(self._slots.lengths) != len(self._rows):
            raise RuntimeError(f"{len(self._rows)} sentences run, but {len(self._slots.lengths)} slots are taken")
