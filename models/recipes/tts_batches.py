"""What the reader and the speaker learn from, ready for their losses, and the order in which they meet it."""

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
from tts_data import Example, pointers

POOL = 20  # batches whose sentences are sorted by length together


@dataclass(frozen=True, kw_only=True)
class Passage:
    """For the reader: a text and, word by word, where its letters begin and what it sounds like."""

    text: str
    voice: int
    begins: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """For the speaker: a sentence as it would have said it itself."""

    voice: int
    rate: float
    phonemes: Tensor  # [P]
    inputs: Tensor  # [N, F]: the frame before each frame; the first has no codes
    codes: Tensor  # [N, K]
    steps: Tensor  # [N]: how many phonemes each frame passes

    def __len__(self) -> int:
        return len(self.phonemes) + len(self.codes)


def passage(config: PocketConfig, one: Example) -> Passage:
    words = [
        (begin, [s.name for s in sounds])
        for begin, sounds in groupby(one.sounds, lambda s: s.character)
    ]
    return Passage(
        text=one.text,
        voice=one.voice,
        begins=(0, *(begin for begin, _ in words[1:])),
        words=tuple(tuple(config.phonemes.index(name) for name in names) for _, names in words),
    )


@torch.no_grad()
def walk(config: PocketConfig, codec: SpeechCodec, one: Example) -> Walk:
    """The sentence in codes of `codec`."""
    codes = codec.quantizer(codec.encoder(one.features[None]))[0][0]
    phonemes = [config.phonemes.index(sound.name) for sound in one.sounds]
    places = pointers(config, [sound.second for sound in one.sounds], len(codes))
    pointer, end = Pointer(phonemes), len(config.phonemes)
    rows = [pointer.columns(end)]
    for before, after in pairwise(places):
        pointer.move(after - before)
        rows.append(pointer.columns(end))
    heard = torch.cat([torch.full((1, codes.shape[1]), -1), codes[:-1]])
    return Walk(
        voice=one.voice,
        rate=one.rate,
        phonemes=torch.tensor(phonemes),
        inputs=torch.cat([heard, torch.tensor(rows[:-1])], dim=1),
        codes=codes,
        steps=torch.tensor(places).diff(),
    )


class Order:
    """Batches of numbers by step: every epoch in another order, sentences of like length together."""

    def __init__(self, lengths: Sequence[int], size: int, seed: int) -> None:
        self.lengths, self.size, self.seed = lengths, min(size, len(lengths)), seed
        self.per_epoch = len(lengths) // self.size
        self._epoch = lru_cache(maxsize=1)(self._shuffled)

    def at(self, step: int) -> list[int]:
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
