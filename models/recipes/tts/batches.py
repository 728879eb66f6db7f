"""Convert examples to training data of the phonemizer and the frame generator; order batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from random import Random

import torch
from torch import Tensor

from motet_tts.pocket.codec import SpeechCodec
from motet_tts.pocket.config import PocketConfig
from motet_tts.pocket.frame_generator import Pointer
from recipes.tts.data import Example, pointers

POOL = 20  # batches whose sentences are sorted by length together


@dataclass(frozen=True, kw_only=True)
class PhonemizerExample:
    """Hold a text and, word by word, its first character and phonemes."""

    text: str
    voice: int
    begins: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        """Return the number of characters."""
        return len(self.text)


@dataclass(frozen=True, kw_only=True)
class GeneratorExample:
    """Hold the teacher-forced inputs and targets of a sentence.

    Shapes: P phonemes, N code frames, K codebooks, F input columns.
    """

    voice: int
    rate: float
    phonemes: Tensor  # [P]
    inputs: Tensor  # [N, F]: the frame before each frame; the first has no codes
    codes: Tensor  # [N, K]
    steps: Tensor  # [N]: how many phonemes each frame passes

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.phonemes) + len(self.codes)


def phonemizer_example(config: PocketConfig, one: Example) -> PhonemizerExample:
    """Split an example's phonemes by word."""
    words = [
        (begin, [phoneme.name for phoneme in group])
        for begin, group in groupby(one.phonemes, lambda phoneme: phoneme.character)
    ]
    return PhonemizerExample(
        text=one.text,
        voice=one.voice,
        begins=(0, *(begin for begin, _ in words[1:])),
        words=tuple(tuple(config.phonemes.index(name) for name in names) for _, names in words),
    )


@torch.no_grad()
def generator_example(config: PocketConfig, codec: SpeechCodec, one: Example) -> GeneratorExample:
    """Encode an example with `codec`."""
    codes = codec.quantizer(codec.encoder(one.features[None]))[0][0]
    phonemes = [config.phonemes.index(phoneme.name) for phoneme in one.phonemes]
    places = pointers(config, [phoneme.second for phoneme in one.phonemes], len(codes))
    pointer, end = Pointer(phonemes), len(config.phonemes)
    rows = [pointer.columns(end)]
    for before, after in pairwise(places):
        pointer.move(after - before)
        rows.append(pointer.columns(end))
    previous_codes = torch.cat([torch.full((1, codes.shape[1]), -1), codes[:-1]])
    return GeneratorExample(
        voice=one.voice,
        rate=one.rate,
        phonemes=torch.tensor(phonemes),
        inputs=torch.cat([previous_codes, torch.tensor(rows[:-1])], dim=1),
        codes=codes,
        steps=torch.tensor(places).diff(),
    )


class BatchOrder:
    """Order examples by step: shuffled in every epoch, similar lengths together."""

    def __init__(self, lengths: Sequence[int], size: int, seed: int) -> None:
        self.lengths, self.size, self.seed = lengths, min(size, len(lengths)), seed
        self.per_epoch = len(lengths) // self.size
        self._epoch = lru_cache(maxsize=1)(self._shuffled)

    def batch(self, step: int) -> list[int]:
        """Return the example numbers of `step`."""
        epoch, place = divmod(step, self.per_epoch)
        return self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        rng = Random(f"{self.seed}/{epoch}")
        numbers = rng.sample(range(len(self.lengths)), len(self.lengths))
        sorted_ = [
            number
            for start in range(0, len(numbers), POOL * self.size)
            for number in sorted(
                numbers[start : start + POOL * self.size], key=lambda n: self.lengths[n]
            )
        ]
        made = [sorted_[start : start + self.size] for start in range(0, len(sorted_), self.size)]
        full = [batch for batch in made if len(batch) == self.size]
        return rng.sample(full, len(full))
