"""Batch codec language models: decoders that generate codec frames autoregressively.

A `CodecLm` family defines how a text becomes a prompt, how a hidden state becomes a frame and how a
frame is fed back. `CodecBatch` does the rest for all families: one slot per sentence, and one for
its text where an encoder has read it, sentences that join and leave between two frames, one forward
pass per frame for all, and the codec's decoder in chunks that begin small.

Shapes: B sentences, P positions of a prompt, L positions of a text, W rows that a model computes
for a sentence, E hidden size, N frames, … a frame's own (codebooks, a latent, a spectrum).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet_shared.errors import BadRequest
from motet_tts.codecs.chunks import ChunkDecoder
from motet_tts.codecs.codec import Codec, State
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .kv_slots import KvSlots, SlotBatch
from .noise import Noise
from .text_slots import DecoderCache


@dataclass(slots=True)
class CodecSentence:
    """Hold the state of one running utterance.

    prompt: embeddings `[P, E]`.
    tokens: of the prompt.
    codec: the decoder's state.
    family_state: whatever the family keeps for the sentence.
    text: `[W, L, E]`, what an encoder made of the text, for models with a decoder that reads it.
    hidden: `[E]` or `[W, E]`, what the next frame is sampled from.
    frame: `[…]`, the last one.
    waiting: frames that are not decoded yet.
    frames, decoded: numbers of frames generated and decoded.
    """

    key: Key
    utterance: Utterance
    prompt: Tensor  # [P, E]
    max_frames: int
    tokens: int
    codec: State
    family_state: Any = None
    text: Tensor | None = None
    hidden: Tensor | None = None
    frame: Tensor | None = None
    waiting: list[Tensor] = field(default_factory=list)
    frames: int = 0
    decoded: int = 0
    done: bool = False

    @property
    def noise(self) -> Noise:
        """Return the noise of the next frame."""
        return Noise(self.utterance.seed, self.utterance.index, self.frames)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Hold the next frame of each sentence.

    frames: `[B, …]`, which the next step is computed from.
    heard: the frame that the codec decodes next, if any: with codes that are delayed against each
        other, it is put together from several steps.
    last: whether the sentence ends with it.
    """

    frames: Tensor
    heard: Sequence[Tensor | None]
    last: Sequence[bool]


@dataclass(frozen=True, slots=True)
class DecoderBatch:
    """Hold the slots of one forward pass.

    own: the slots of the sentences.
    sentences: the rows in order.
    texts: those of their texts; None for a model without an encoder.
    joining: the sentence that joins with its prompt, alone in the batch; None for further frames.
    """

    own: SlotBatch
    sentences: list[CodecSentence]
    texts: SlotBatch | None = None
    joining: CodecSentence | None = None

    @property
    def cache(self) -> Any:
        """Return what a transformers model takes as `past_key_values`."""
        return self.own if self.texts is None else DecoderCache(self.own, self.texts)

    @property
    def new_text(self) -> Tensor | None:
        """Return the text `[W, L, E]` of the sentence that joins; the others' are stored."""
        return None if self.joining is None else self.joining.text

    @property
    def positions(self) -> Tensor:
        """Return the new positions `[B, Q]`."""
        return self.own.positions

    @property
    def mask(self) -> Tensor:
        """Return the mask `[B, 1, Q, T]`, True where a position may attend."""
        return self.own.mask

    def close(self) -> None:
        """Record the new lengths after the forward pass."""
        self.own.close()
        if self.texts is not None:
            self.texts.close()


class CodecLm(ABC):
    """Adapt one checkpoint of a family of codec language models.

    voices: names, the default one first.
    rates: slowest and fastest speed that the model supports itself.
    clones: whether it speaks with the voice of `Utterance.sample`.
    instructs: whether it follows `Utterance.instructions`.
    """

    codec: Codec
    device: torch.device
    dtype: torch.dtype
    voices: tuple[str, ...]
    rates: tuple[float, float] = (1.0, 1.0)
    clones: bool = False
    instructs: bool = False

    @abstractmethod
    def begin(self, key: Key, utterance: Utterance) -> CodecSentence:
        """Return the sentence with its prompt embedded. Raises BadRequest if it cannot be spoken."""

    @abstractmethod
    def forward(self, inputs_BQE: Tensor, batch: DecoderBatch) -> Tensor:
        """Return the hidden states `[B, E]` or `[B, W, E]` of the last positions."""

    @abstractmethod
    def draw(self, hidden_BE: Tensor, sentences: list[CodecSentence]) -> Drawn:
        """Choose each sentence's next frame."""

    @abstractmethod
    def embed(self, frames_B: Tensor, sentences: list[CodecSentence]) -> Tensor:
        """Return the input of the next position for each frame: `[B, 1, E]`."""

    def shape(self, sentence: CodecSentence, samples: Tensor) -> Tensor:
        """Post-process samples, on the CPU, as the family's processor does, such as a fade-in.

        `sentence.decoded` frames precede them.
        """
        return samples

    def starts(self, sentence: CodecSentence) -> tuple[int, ...] | None:
        """Return the first sample of each word begun so far; None if the model does not know."""
        return None

    @property
    def frame_seconds(self) -> float:
        """Return the seconds of speech in a frame."""
        return self.codec.frame_samples / self.codec.sample_rate


def room_for(prompt: int, context: int) -> int:
    """Return how many frames fit into `context` positions after a prompt of `prompt` tokens.

    Raises BadRequest if there is no room.
    """
    if prompt >= context:
        raise BadRequest(
            f"text: a sentence of {prompt} tokens leaves no room in a context of {context}; use shorter sentences",
            param="input",
        )
    return context - prompt


class CodecBatch:
    """Run all sentences of one `CodecLm`.

    first_chunk, chunk: seconds of speech as in `ChunkDecoder`.
    """

    def __init__(self, family: CodecLm, *, first_chunk: float = 0.06, chunk: float = 0.32):
        self.family = family
        self.sample_rate = family.codec.sample_rate
        self.voices, self.rates = family.voices, family.rates
        self.clones, self.instructs = family.clones, family.instructs
        self.device, self.dtype = family.device, family.dtype
        self._slots, self._texts = KvSlots(family.device), KvSlots(family.device)
        self._rows: list[CodecSentence] = []  # indexed by slot
        self._new: list[CodecSentence] = []
        self._silent: list[CodecSentence] = []  # sentences that turned out to have no frames
        self._chunks = ChunkDecoder(
            family.codec, family.device, first_chunk=first_chunk, chunk=chunk
        )

    def __len__(self) -> int:
        return len(self._rows) + len(self._new)

    @property
    def has_work(self) -> bool:
        """Return True while there are sentences."""
        return len(self) > 0

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a sentence to the next step. Raises BadRequest if it cannot be spoken."""
        self._new.append(self.family.begin(key, utterance))

    def remove(self, key: Key) -> None:
        """Drop a sentence without further output. Unknown keys are ignored."""
        self._new = [sentence for sentence in self._new if sentence.key != key]
        for slot, sentence in enumerate(self._rows):
            if sentence.key == key:
                self._free_slot(slot)
                return

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Generate one frame for each sentence; return samples of those whose chunk is full."""
        self._advance()
        self._admit()
        self._draw()
        outputs = [
            *self._decode(),
            *(StepOutput(sentence.key, done=True) for sentence in self._silent),
        ]
        self._silent = []
        for slot in reversed(range(len(self._rows))):
            if self._rows[slot].done:
                self._free_slot(slot)
        return outputs

    def _advance(self) -> None:
        """Compute the hidden states of sentences that have a frame already, in one pass."""
        if not self._rows:
            return
        frames_B = torch.stack(
            [sentence.frame for sentence in self._rows if sentence.frame is not None]
        )
        count = len(self._rows)
        texts = self._texts.first(count, 0) if self._texts.lengths else None
        batch = DecoderBatch(self._slots.first(count), self._rows, texts)
        hidden_BE = self.family.forward(self.family.embed(frames_B, self._rows), batch)
        batch.close()
        for sentence, hidden in zip(self._rows, hidden_BE, strict=True):
            sentence.hidden = hidden

    def _admit(self) -> None:
        """Prefill new sentences one by one: prompts are short and of different lengths."""
        new, self._new = self._new, []
        for sentence in new:
            if sentence.done:
                self._silent.append(sentence)
                continue
            own = self._slots.one(self._slots.add(), len(sentence.prompt))
            text = sentence.text
            texts = None if text is None else self._texts.one(self._texts.add(), text.shape[1])
            batch = DecoderBatch(own, [sentence], texts, sentence)
            sentence.hidden = self.family.forward(sentence.prompt[None], batch)[0]
            batch.close()
            sentence.text = None
            self._rows.append(sentence)

    def _draw(self) -> None:
        if not self._rows:
            return
        hidden_BE = torch.stack(
            [sentence.hidden for sentence in self._rows if sentence.hidden is not None]
        )
        drawn = self.family.draw(hidden_BE, self._rows)
        for row, sentence in enumerate(self._rows):
            sentence.frame = drawn.frames[row]
            sentence.frames += 1
            if (heard := drawn.heard[row]) is not None:
                sentence.waiting.append(heard)
            sentence.done = drawn.last[row] or sentence.frames >= sentence.max_frames

    def _decode(self) -> list[StepOutput]:
        """Decode the chunks that are due."""
        return [
            self._output(sentence, chunk) for sentence, chunk in self._chunks.decode(self._rows)
        ]

    def _output(self, sentence: CodecSentence, chunk: Tensor) -> StepOutput:
        samples = self._chunks.finish(sentence, self.family.shape(sentence, chunk))
        starts = self.family.starts(sentence)
        return StepOutput(
            sentence.key, samples, starts, sentence.done, sentence.tokens, sentence.frames
        )

    def _free_slot(self, slot: int) -> None:
        self._slots.remove(slot)
        if self._texts.lengths:
            self._texts.remove(slot)
        last = self._rows.pop()
        if slot < len(self._rows):
            self._rows[slot] = last

    def check_integrity(self) -> None:
        """Raise RuntimeError if rows and slots do not correspond."""
        if len(self._slots.lengths) != len(self._rows):
            raise RuntimeError(
                f"{len(self._rows)} sentences run, but {len(self._slots.lengths)} slots are taken"
            )
        if self._texts.lengths and len(self._texts.lengths) != len(self._rows):
            raise RuntimeError(
                f"{len(self._rows)} sentences run, but {len(self._texts.lengths)} texts are stored"
            )
