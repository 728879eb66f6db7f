"""Batches of pocket-asr by training step, from shards: clips of similar length, masked a little, padded to a window."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import asr_tokenizer as names
from asr_data import DECADES, UNKNOWN, Example
from asr_recipe import Recipe
from asr_shards import Shards, order
from asr_tokenizer import STEP, WhisperTokenizer

IGNORED = -100
GRAIN = 40  # frames: few different lengths, since the libraries prepare each shape anew


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Features [B, 80, T], decoder tokens and labels [B, L], where to look [B, L, T/2], phonemes [B, T/2]."""

    features: Tensor
    tokens: Tensor
    labels: Tensor
    look: Tensor
    phonemes: Tensor


def restore(one: Example, frames: int) -> NDArray[np.float32]:
    """The features [80, frames] of a padded clip; the padding is digital silence, which is the floor of its range."""
    whole = np.zeros((one.features.shape[0], frames), np.float32)
    whole[:, : one.frames] = one.features
    return np.float32(DECADES / 4) * (whole / np.float32(255) - 1) + np.float32(one.peak)


def mask(features: NDArray[np.float32], rng: Random, frames: int) -> None:
    """Silence a band of frequencies and two short stretches of time (SpecAugment, mild), in place."""
    floor = float(features.min())
    if rng.random() < 0.5:
        low, width = rng.randrange(80), rng.randint(1, 12)
        features[low : low + width] = floor
    for _ in range(rng.choice((0, 1, 2))):
        start, width = rng.randrange(max(1, frames)), rng.randint(1, 8)
        features[:, start : start + width] = floor


class Stream:
    """Batches as a function of (recipe, step)."""

    def __init__(self, recipe: Recipe, tokenizer: WhisperTokenizer, shards: Shards) -> None:
        self.recipe, self.shards = recipe, shards
        self.id = {token: tokenizer.convert_tokens_to_ids(token) for token in names.SPECIALS}
        self.first_timestamp = tokenizer.convert_tokens_to_ids(names.TIMESTAMPS[0])
        self.per_visit = recipe.shard // recipe.batch
        self._visit = -1
        self._batches: list[list[Example]] = []

    def batch(self, step: int) -> Batch:
        visit, place = divmod(step, self.per_visit)
        if visit != self._visit:
            self._visit, self._batches = visit, self._cut(visit)
        rng = Random(f"{self.recipe.seed}/{step}")
        return self.collate(self._batches[place], rng)

    def _cut(self, visit: int) -> list[list[Example]]:
        """The shard of a visit in batches of similar length, in random order."""
        rng = Random(f"{self.recipe.seed}/{order(self.recipe, visit)}")
        examples = sorted(
            self.shards.visit(visit), key=lambda one: one.frames + rng.uniform(-20, 20)
        )
        size = self.recipe.batch
        batches = [examples[start : start + size] for start in range(0, len(examples), size)]
        rng.shuffle(batches)
        return batches

    def collate(self, examples: list[Example], rng: Random) -> Batch:
        """Right-padded tensors; some batches fill the whole window, others a little more than their longest clip."""
        most = 2 * self.recipe.positions
        if rng.random() < self.recipe.whole_share:
            frames, examples = most, examples[::4]  # a step that costs what the others cost
        else:
            longest = max(one.frames for one in examples) + rng.randrange(30)
            frames = min(most, -(-longest // GRAIN) * GRAIN)
        features = np.stack([restore(one, frames) for one in examples])
        for row, one in zip(features, examples, strict=True):
            mask(row, rng, one.frames)
        rows = [
            self.write(one, timed=rng.random() < self.recipe.timestamp_share) for one in examples
        ]
        length = -(-max(len(tokens) for tokens, _, _ in rows) // 8) * 8
        tokens = np.full((len(rows), length), self.id[names.END])
        labels = np.full((len(rows), length), IGNORED)
        look = np.zeros((len(rows), length, frames // 2), bool)
        phonemes = np.zeros((len(rows), frames // 2), np.int64)
        for i, (said, wanted, spans) in enumerate(rows):
            tokens[i, : len(said)], labels[i, : len(said)] = said, wanted
            known = examples[i].phonemes.astype(np.int64)
            phonemes[i, : len(known)] = np.where(known == UNKNOWN, IGNORED, known)
            for place, (start, end) in spans:
                look[i, place, int(start / STEP) : int(end / STEP) + 1] = True
        parts = (features, tokens, labels, look, phonemes)
        return Batch(
            **dict(zip(Batch.__dataclass_fields__, map(torch.from_numpy, parts), strict=True))
        )

    def write(
        self, one: Example, *, timed: bool
    ) -> tuple[list[int], list[int], list[tuple[int, tuple[float, float]]]]:
        """What the decoder reads, what it is to write at each place, and when the word is spoken that it writes."""
        start, end = self.id[names.START], self.id[names.END]
        head = [start, self.id[names.ENGLISH], self.id[names.TRANSCRIBE]]
        if not one.tokens:
            wanted = [self.id[names.NO_SPEECH], IGNORED, IGNORED, end]
            return [*head, self.id[names.NO_TIMESTAMPS]], wanted, []
        spans = [(3 + i, span) for i, span in enumerate(one.spans)]
        if timed:
            begin, until = (self._stamp(second) for second in (one.spans[0][0], one.spans[-1][1]))
            said = [*head, begin, *one.tokens, until]
            return said, [head[1], IGNORED, *said[3:], end], spans
        said = [*head, self.id[names.NO_TIMESTAMPS], *one.tokens]
        return said, [head[1], IGNORED, IGNORED, *one.tokens, end], spans

    def _stamp(self, second: float) -> int:
        return self.first_timestamp + min(len(names.TIMESTAMPS) - 1, max(0, round(second / STEP)))

    def ahead(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of steps `start` to `stop`, made one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batch, start)
            for step in range(start, stop):
                ready = coming.result()
                if step + 1 < stop:
                    coming = pool.submit(self.batch, step + 1)
                yield ready
