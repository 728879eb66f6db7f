"""Batch pocket-asr clips of similar length by training step, masked and padded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.asr import tokenizer as names
from recipes.asr.data import DYNAMIC_RANGE, UNKNOWN, Example
from recipes.asr.recipe import Recipe
from recipes.asr.shards import Shards, shard_of_visit
from recipes.asr.tokenizer import STEP, WhisperTokenizer

IGNORED = -100
LENGTH_MULTIPLE = 40  # frames; few distinct shapes, since oneDNN prepares each one


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Hold the tensors of one training step: B clips, T frames, L decoder tokens.

    features: [B, 80, T]. tokens, labels: [B, L]; IGNORED labels have no loss. word_frames: [B, L,
    T/2], True where the word of a label is spoken. phonemes: [B, T/2].
    """

    features: Tensor
    tokens: Tensor
    labels: Tensor
    word_frames: Tensor
    phonemes: Tensor


def dequantize(one: Example, frames: int) -> NDArray[np.float32]:
    """Return the features [80, frames] of a clip, padded with the floor of its range."""
    whole = np.zeros((one.features.shape[0], frames), np.float32)
    whole[:, : one.frames] = one.features
    return np.float32(DYNAMIC_RANGE / 4) * (whole / np.float32(255) - 1) + np.float32(one.peak)


def spec_augment(features: NDArray[np.float32], rng: Random, frames: int) -> None:
    """Mask a band of frequencies and up to two stretches of time in place (SpecAugment, 2019)."""
    floor = float(features.min())
    if rng.random() < 0.5:
        low, width = rng.randrange(80), rng.randint(1, 12)
        features[low : low + width] = floor
    for _ in range(rng.choice((0, 1, 2))):
        start, width = rng.randrange(max(1, frames)), rng.randint(1, 8)
        features[:, start : start + width] = floor


class Stream:
    """Serve batches as a function of (recipe, step)."""

    def __init__(self, recipe: Recipe, tokenizer: WhisperTokenizer, shards: Shards) -> None:
        self.recipe, self.shards = recipe, shards
        self.id = {token: tokenizer.convert_tokens_to_ids(token) for token in names.SPECIALS}
        self.first_timestamp = tokenizer.convert_tokens_to_ids(names.TIMESTAMPS[0])
        self.steps_per_visit = recipe.shard // recipe.batch
        self._visit = -1
        self._batches: list[list[Example]] = []

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`."""
        visit, place = divmod(step, self.steps_per_visit)
        if visit != self._visit:
            self._visit, self._batches = visit, self._sorted_batches(visit)
        rng = Random(f"{self.recipe.seed}/{step}")
        return self.collate(self._batches[place], rng)

    def _sorted_batches(self, visit: int) -> list[list[Example]]:
        """Group the shard of a visit into batches of similar length, in random order."""
        rng = Random(f"{self.recipe.seed}/{shard_of_visit(self.recipe, visit)}")
        examples = sorted(
            self.shards.visit(visit), key=lambda one: one.frames + rng.uniform(-20, 20)
        )
        size = self.recipe.batch
        batches = [examples[start : start + size] for start in range(0, len(examples), size)]
        rng.shuffle(batches)
        return batches

    def collate(self, examples: list[Example], rng: Random) -> Batch:
        """Stack examples, padded to the whole window or a little past the longest clip."""
        max_frames = 2 * self.recipe.positions
        if rng.random() < self.recipe.full_window_share:
            frames, examples = max_frames, examples[::4]  # a quarter of the clips, for equal cost
        else:
            longest = max(one.frames for one in examples) + rng.randrange(30)
            frames = min(max_frames, -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        features = np.stack([dequantize(one, frames) for one in examples])
        for row, one in zip(features, examples, strict=True):
            spec_augment(row, rng, one.frames)
        rows = [
            self.decoder_row(one, timed=rng.random() < self.recipe.timestamp_share)
            for one in examples
        ]
        length = -(-max(len(tokens) for tokens, _, _ in rows) // 8) * 8
        tokens = np.full((len(rows), length), self.id[names.END])
        labels = np.full((len(rows), length), IGNORED)
        word_frames = np.zeros((len(rows), length, frames // 2), bool)
        phonemes = np.zeros((len(rows), frames // 2), np.int64)
        for i, (row_tokens, row_labels, spans) in enumerate(rows):
            tokens[i, : len(row_tokens)], labels[i, : len(row_tokens)] = row_tokens, row_labels
            known = examples[i].phonemes.astype(np.int64)
            phonemes[i, : len(known)] = np.where(known == UNKNOWN, IGNORED, known)
            for place, (start, end) in spans:
                word_frames[i, place, int(start / STEP) : int(end / STEP) + 1] = True
        parts = (features, tokens, labels, word_frames, phonemes)
        return Batch(
            **dict(zip(Batch.__dataclass_fields__, map(torch.from_numpy, parts), strict=True))
        )

    def decoder_row(
        self, one: Example, *, timed: bool
    ) -> tuple[list[int], list[int], list[tuple[int, tuple[float, float]]]]:
        """Return decoder inputs, labels, and for each label with a word its place and seconds."""
        start, end = self.id[names.START], self.id[names.END]
        head = [start, self.id[names.ENGLISH], self.id[names.TRANSCRIBE]]
        if not one.tokens:
            row_labels = [self.id[names.NO_SPEECH], IGNORED, IGNORED, end]
            return [*head, self.id[names.NO_TIMESTAMPS]], row_labels, []
        spans = [(3 + i, span) for i, span in enumerate(one.spans)]
        if timed:
            begin, until = (
                self._timestamp_token(second) for second in (one.spans[0][0], one.spans[-1][1])
            )
            row_tokens = [*head, begin, *one.tokens, until]
            return row_tokens, [head[1], IGNORED, *row_tokens[3:], end], spans
        row_tokens = [*head, self.id[names.NO_TIMESTAMPS], *one.tokens]
        return row_tokens, [head[1], IGNORED, IGNORED, *one.tokens, end], spans

    def _timestamp_token(self, second: float) -> int:
        return self.first_timestamp + min(len(names.TIMESTAMPS) - 1, max(0, round(second / STEP)))

    def prefetch(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield the batches of steps `start` to `stop`, each computed one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self.batch, start)
            for step in range(start, stop):
                ready = pending.result()
                if step + 1 < stop:
                    pending = pool.submit(self.batch, step + 1)
                yield ready
