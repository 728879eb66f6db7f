"""Keep a pool of speech on a device, and make batches of it there.

Clips come from the shards that `asr.speech` writes, the oldest ones leave when the pool is full.
Batches are drawn at random from what is there; conditions, silence and masks anew at each visit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Lock, Thread

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import WhisperTokenizer

from recipes.asr import speech as asr_speech
from recipes.asr import tokenizer as names
from recipes.asr.batches import IGNORED, LENGTH_MULTIPLE, Batch
from recipes.asr.conditions import Draw, record
from recipes.asr.data import FRAME, UNKNOWN
from recipes.asr.recipe import PoolRecipe
from recipes.asr.speech import MARKS, SpeechShard
from recipes.asr.tokenizer import STEP, WINDOW
from recipes.speech.noise import RATE

_STEP_SAMPLES = round(STEP * RATE)


class Pool:
    """Hold clips in two rings on a device: samples end to end, and rows of labels."""

    def __init__(self, recipe: PoolRecipe, device: torch.device) -> None:
        rows, self.device = recipe.pool_clips, device
        self.samples = torch.empty(recipe.pool_samples, dtype=torch.int16, device=device)
        self.tokens = torch.empty((rows, recipe.max_tokens), dtype=torch.int16, device=device)
        self.spans = torch.empty((rows, recipe.max_tokens, 2), dtype=torch.int16, device=device)
        self.phonemes = torch.empty((rows, WINDOW * MARKS), dtype=torch.uint8, device=device)
        self.labels = {"tokens": self.tokens, "spans": self.spans, "phonemes": self.phonemes}
        self.starts, self.lengths = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self.counts = np.zeros(rows, np.int64)  # tokens
        self.held: deque[tuple[range, range]] = deque()  # rows and samples of each shard
        self.lock, self.added = Lock(), 0

    def add(self, shard: SpeechShard) -> None:
        """Copy a shard into the pool in place of the oldest ones."""
        staged = {name: torch.from_numpy(part) for name, part in vars(shard).items()}
        if self.device.type == "cuda":  # else copies wait for the steps under way
            staged = {name: part.pin_memory() for name, part in staged.items()}
        with self.lock:
            rows = self._place(len(shard.lengths), 0, len(self.starts))
            places = self._place(len(shard.samples), 1, len(self.samples))
            while self.held and any(
                _overlap(old, new) for old, new in zip(self.held[0], (rows, places), strict=True)
            ):
                self.held.popleft()
            row = slice(rows.start, rows.stop)
            self.samples[places.start : places.stop].copy_(staged["samples"], non_blocking=True)
            for name, part in self.labels.items():
                part[row].copy_(staged[name], non_blocking=True)
            self.lengths[row] = shard.lengths
            self.starts[row] = places.start + np.cumsum(shard.lengths) - shard.lengths
            self.counts[row] = (shard.tokens >= 0).sum(1)
            self.held.append((rows, places))
            self.added += len(rows)

    def _place(self, count: int, kind: int, room: int) -> range:
        """Return where the next `count` rows (kind 0) or samples (kind 1) go."""
        start = self.held[-1][kind].stop if self.held else 0
        start = start if start + count <= room else 0
        return range(start, start + count)

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return the rows of `count` clips at random."""
        shards = [rows for rows, _ in self.held]
        ends = np.cumsum([len(rows) for rows in shards])
        places = rng.integers(ends[-1], size=count)
        shard = np.searchsorted(ends, places, side="right")
        return np.array([rows.stop for rows in shards])[shard] - (ends[shard] - places)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


class PoolStream:
    """Make batches from a pool that a thread fills from a folder of shards."""

    def __init__(
        self, recipe: PoolRecipe, tokenizer: WhisperTokenizer, folder: Path, device: torch.device
    ) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        self.pool = Pool(recipe, device)
        self.id = {token: tokenizer.convert_tokens_to_ids(token) for token in names.SPECIALS}
        self.first_timestamp = tokenizer.convert_tokens_to_ids(names.TIMESTAMPS[0])
        self.rng = np.random.default_rng(recipe.seed)
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.window = torch.hann_window(400, device=device)
        filters = np.asarray(names.feature_extractor().mel_filters, np.float32)
        self.mel = torch.from_numpy(filters).to(device)  # [201, 80]
        self._ended = Event()
        self._reader = Thread(target=self._read, daemon=True)

    def start(self) -> None:
        """Start reading shards into the pool."""
        self._reader.start()

    def stop(self) -> None:
        """Stop reading."""
        self._ended.set()
        self._reader.join()

    def _read(self) -> None:
        while not self._ended.is_set():
            paths = sorted(self.folder.glob("*.npz"))
            for path in paths:
                if self._ended.is_set():
                    return
                self.pool.add(asr_speech.read(path))
                path.unlink()
            if not paths:
                self._ended.wait(0.05)

    def batches(self, go_on: Callable[[], bool]) -> Iterator[Batch]:
        """Yield batches while `go_on` returns True, the first one when enough clips are there.

        Raises RuntimeError if the reader ends before that.
        """
        while self.pool.added < self.recipe.first_clips:
            if not self._reader.is_alive():
                raise RuntimeError(f"no shards could be read from {self.folder}")
            if not go_on():
                return
            time.sleep(0.05)
        size = self.recipe.batch
        while go_on():
            with self.pool.lock:
                rows = self.pool.draw(self.rng, size * self.recipe.chunk)
            rows = rows[np.argsort(self.pool.lengths[rows], kind="stable")]
            for place in self.rng.permutation(self.recipe.chunk):
                if go_on():
                    yield self.batch(rows[place * size : (place + 1) * size])

    @torch.no_grad()
    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """Return clips of the pool in new conditions."""
        recipe, count = self.recipe, len(rows)
        low, high = recipe.conditions.before
        before = (self.rng.uniform(low, high, count) * RATE).astype(np.int64)
        after = (self.rng.uniform(*recipe.conditions.after, count) * RATE).astype(np.int64)
        with self.pool.lock:
            starts, lengths = self.pool.starts[rows], self.pool.lengths[rows]
            tokens_each = self.pool.counts[rows]
        whole = before + lengths + after
        frames = int(whole.max()) // FRAME + 1 + int(self.rng.integers(30))
        if self.rng.random() < recipe.full_window_share:
            frames = 2 * recipe.positions
        frames = min(2 * recipe.positions, -(-frames // LENGTH_MULTIPLE) * LENGTH_MULTIPLE)
        numbers = np.stack([rows, starts, lengths, before, whole, tokens_each])
        sent = torch.from_numpy(numbers).to(self.device, non_blocking=True)
        row, start, length, silence, total, texts = sent[:, :, None]  # each [B, 1]
        place = torch.arange(frames * FRAME, device=self.device) - silence
        spoken = (place >= 0) & (place < length)
        waves = self.pool.samples[start + torch.where(spoken, place, 0)].float() * spoken
        waves = record(waves, length, total, self.generator, recipe.conditions)
        features = self.mask(self.features(waves), total // FRAME)
        tokens, labels, word_frames = self.text(
            row[:, 0], texts, silence, -(-(int(tokens_each.max()) + 5) // 8) * 8, frames // 2
        )
        middle = torch.arange(frames // 2, device=self.device) * _STEP_SAMPLES + _STEP_SAMPLES // 2
        mark = (middle - silence) * MARKS // RATE
        known = self.pool.phonemes[row, mark.clamp(0, WINDOW * MARKS - 1)].long()
        known = torch.where(known == UNKNOWN, IGNORED, known) * (mark >= 0)
        return Batch(
            features=features,
            tokens=tokens,
            labels=labels,
            word_frames=word_frames,
            phonemes=known,
        )

    def features(self, waves: Tensor) -> Tensor:
        """Return Whisper's log-mel features [B, 80, N / 160] of waves [B, N]."""
        spectrum = torch.stft(waves, 400, FRAME, window=self.window, return_complex=True)
        power = spectrum[..., :-1].abs().square()
        log = (self.mel.T @ power).clamp(min=1e-10).log10()
        return (log.maximum(log.amax((1, 2), keepdim=True) - 8.0) + 4.0) / 4.0

    def mask(self, features: Tensor, frames: Tensor) -> Tensor:
        """Mask up to two bands of frequencies and two stretches of time (SpecAugment, 2019)."""
        draw = Draw(self.generator, len(features))
        band = torch.arange(80, device=self.device)
        moment = torch.arange(features.shape[2], device=self.device)
        bands = torch.zeros(len(features), 80, dtype=torch.bool, device=self.device)
        moments = torch.zeros(len(features), len(moment), dtype=torch.bool, device=self.device)
        for _ in range(2):
            first, width = draw.uniform(0, 80).floor(), draw.uniform(1, 12) * draw.chance(0.35)
            bands |= (band >= first) & (band < first + width)
            first, width = (draw.uniform() * frames).floor(), draw.uniform(1, 9) * draw.chance(0.5)
            moments |= (moment >= first) & (moment < first + width)
        floor = features.amin((1, 2), keepdim=True)
        return torch.where(bands[:, :, None] | moments[:, None, :], floor, features)

    def text(
        self, rows: Tensor, counts: Tensor, silence: Tensor, length: int, positions: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return decoder inputs and labels [B, length], and the frames of each label's word."""
        texts = self.pool.tokens[rows, :length].long()
        spans = self.pool.spans[rows, :length].long() * (RATE // 1000) + silence[:, :, None]
        spans = (spans // _STEP_SAMPLES).clamp(0, positions - 1)  # encoder positions
        timed = (Draw(self.generator, len(rows)).chance(self.recipe.timestamp_share)) & (counts > 0)
        begin = self.first_timestamp + spans[:, :1, 0]
        last = spans[:, :, 1].gather(1, (counts - 1).clamp(min=0))
        until = self.first_timestamp + (last + 1).clamp(max=len(names.TIMESTAMPS) - 1)
        end = self.id[names.END]
        tokens = torch.full((len(rows), length), end, device=self.device)
        labels = torch.full((len(rows), length), IGNORED, device=self.device)
        place = torch.arange(length, device=self.device)
        tokens[:, 0], tokens[:, 1] = self.id[names.START], self.id[names.ENGLISH]
        tokens[:, 2] = self.id[names.TRANSCRIBE]
        tokens[:, 3:4] = torch.where(timed, begin, self.id[names.NO_TIMESTAMPS])
        said = (place >= 4) & (place < 4 + counts)
        tokens = torch.where(said, texts[:, (place - 4).clamp(min=0)], tokens)
        tokens = torch.where((place == 4 + counts) & timed, until, tokens)
        labels[:, 0:1] = torch.where(counts > 0, self.id[names.ENGLISH], self.id[names.NO_SPEECH])
        labels[:, 2:3] = torch.where(timed, begin, IGNORED)
        written = (place >= 3) & (place < 3 + counts)
        labels = torch.where(written, texts[:, (place - 3).clamp(min=0)], labels)
        labels = torch.where((place == 3 + counts) & timed, until, labels)
        labels = torch.where(place == 3 + counts + timed.long(), end, labels)
        shifted = spans[:, (place - 3).clamp(min=0)]
        position = torch.arange(positions, device=self.device)
        word_frames = (position >= shifted[..., :1]) & (position <= shifted[..., 1:])
        return tokens, labels, word_frames & written[..., None]
