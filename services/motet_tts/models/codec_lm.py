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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from motet_kernels.runtime.device import Download
from motet_shared.errors import BadRequest, MotetError
from motet_shared.process.batch_isolation import computed
from motet_tts.codecs.chunks import ChunkDecoder
from motet_tts.codecs.codec import Codec, State
from motet_tts.engine.failures import failure, finite_rows, not_finite
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .kv_slots import KvSlots, SlotBatch
from .noise import Noise
from .text_slots import DecoderCache


@dataclass(slots=True, eq=False)
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
    error: why the sentence ends before it is complete.
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
    error: MotetError | None = None

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
        """Choose each sentence's next frame.

        If it raises, no sentence has changed: it is called again for parts of them.
        """

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
        self._ended: list[CodecSentence] = []  # without a slot: silent ones, and those that failed
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
                self._drop_slot(slot)
                return

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Generate one frame for each sentence; return samples of those whose chunk is full.

        A sentence that fails a batch ends with an error; the others are computed again in parts.
        """
        self._advance()
        self._admit()
        self._draw()
        outputs = self._decode()
        ended, self._ended = self._ended, []
        outputs += [StepOutput(one.key, done=one.error is None, error=one.error) for one in ended]
        for slot in reversed(range(len(self._rows))):
            if self._rows[slot].done:
                self._free_slot(slot)
        return outputs

    def _advance(self) -> None:
        """Compute the hidden states of sentences that have a frame already, in one pass."""
        if self._rows:
            self._compute(self._forward, self._rows)

    def _compute(
        self,
        compute: Callable[[Sequence[CodecSentence]], Sequence[None]],
        sentences: Sequence[CodecSentence],
    ) -> None:
        """Compute for sentences in slots; those that fail alone end."""
        sentences = [*sentences]
        results = computed(compute, sentences)
        for sentence, result in zip(sentences, results, strict=True):
            if isinstance(result, Exception):
                self._fail(sentence, failure(result, self.device))

    def _forward(self, sentences: Sequence[CodecSentence]) -> list[None]:
        """Set the hidden states of sentences in adjacent slots."""
        begin, count = self._rows.index(sentences[0]), len(sentences)
        frames_B = torch.stack([one.frame for one in sentences if one.frame is not None])
        texts = self._texts.many(begin, count, 0) if self._texts.lengths else None
        batch = DecoderBatch(self._slots.many(begin, count), [*sentences], texts)
        hidden_BE = self.family.forward(self.family.embed(frames_B, [*sentences]), batch)
        batch.close()
        for sentence, hidden in zip(sentences, hidden_BE, strict=True):
            sentence.hidden = hidden
        return [None] * count

    def _admit(self) -> None:
        """Prefill new sentences one by one: prompts are short and of different lengths."""
        new, self._new = self._new, []
        for sentence in new:
            if sentence.done:
                self._ended.append(sentence)
                continue
            self._slots.add()
            if sentence.text is not None:
                self._texts.add()
            self._rows.append(sentence)
            self._compute(self._prefill, [sentence])

    def _prefill(self, sentences: Sequence[CodecSentence]) -> list[None]:
        """Set the hidden state of the one sentence, after its prompt."""
        (sentence,), slot = sentences, len(self._rows) - 1
        own, text = self._slots.one(slot, len(sentence.prompt)), sentence.text
        texts = None if text is None else self._texts.one(slot, text.shape[1])
        batch = DecoderBatch(own, [sentence], texts, sentence)
        sentence.hidden = self.family.forward(sentence.prompt[None], batch)[0]
        batch.close()
        sentence.text = None
        return [None]

    def _draw(self) -> None:
        """Choose the next frames; sentences whose hidden state is not finite end."""
        if not self._rows:
            return
        rows = [*self._rows]
        hidden_BE = torch.stack([one.hidden for one in rows if one.hidden is not None])
        finite = Download(finite_rows(hidden_BE))
        self._compute(self._choose, rows)
        for sentence, is_finite in zip(rows, finite.wait().tolist(), strict=True):
            if not is_finite and sentence.error is None:
                self._fail(sentence, not_finite())

    def _choose(self, sentences: Sequence[CodecSentence]) -> list[None]:
        hidden_BE = torch.stack([one.hidden for one in sentences if one.hidden is not None])
        drawn = self.family.draw(hidden_BE, [*sentences])
        for row, sentence in enumerate(sentences):
            sentence.frame = drawn.frames[row]
            sentence.frames += 1
            if (heard := drawn.heard[row]) is not None:
                sentence.waiting.append(heard)
            sentence.done = drawn.last[row] or sentence.frames >= sentence.max_frames
        return [None] * len(sentences)

    def _decode(self) -> list[StepOutput]:
        """Decode the chunks that are due."""
        outputs = []
        for sentence, chunk in self._chunks.decode(self._rows):
            try:
                outputs.append(self._output(sentence, chunk))
            except Exception as error:
                self._fail(sentence, failure(error, self.device))
        return outputs

    def _output(self, sentence: CodecSentence, chunk: Tensor | Exception) -> StepOutput:
        if isinstance(chunk, Exception):
            raise chunk
        samples = self._chunks.finish(sentence, self.family.shape(sentence, chunk))
        starts = self.family.starts(sentence)
        return StepOutput(
            sentence.key, samples, starts, sentence.done, sentence.tokens, sentence.frames
        )

    def _fail(self, sentence: CodecSentence, error: MotetError) -> None:
        """End a sentence that has a slot."""
        self._drop_slot(self._rows.index(sentence))
        sentence.error = error
        self._ended.append(sentence)

    def _drop_slot(self, slot: int) -> None:
        """Free the slot of a sentence that is not complete: it may hold NaN or infinity."""
        self._slots.scrub(slot)
        self._texts.scrub(slot)
        self._free_slot(slot)

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
