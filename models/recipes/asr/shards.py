"""Store training examples in shards: written ahead of the trainer, read a few times, deleted.

The order is fixed: `recipe.group` shards are read in order, then again in shuffled orders; the next
group follows. A shard is a function of (recipe, index), so a lost file is written again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random

import numpy as np

from recipes.asr import data as asr_data
from recipes.asr.data import Example
from recipes.asr.recipe import Recipe
from recipes.asr.tokenizer import WhisperTokenizer

AHEAD = 6  # shards


def shard_of_visit(recipe: Recipe, visit: int) -> tuple[int, int]:
    """Return the shard of a visit and how many visits it had before."""
    per_group = recipe.group * recipe.passes
    group, place = divmod(visit, per_group)
    earlier_uses, place = divmod(place, recipe.group)
    places = list(range(recipe.group))
    if earlier_uses:
        Random(f"{recipe.seed}/{group}/{earlier_uses}").shuffle(places)
    return group * recipe.group + places[place], earlier_uses


def write(path: Path, examples: Sequence[Example]) -> None:
    """Write examples to one file, with their arrays concatenated."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(
            file,
            features=np.concatenate([one.features for one in examples], axis=1),
            phonemes=np.concatenate([one.phonemes for one in examples]),
            tokens=np.array([token for one in examples for token in one.tokens], np.int32),
            spans=np.array([span for one in examples for span in one.spans], np.float32).reshape(
                -1, 2
            ),
            frames=np.array([one.frames for one in examples], np.int32),
            lengths=np.array([len(one.tokens) for one in examples], np.int32),
            peaks=np.array([one.peak for one in examples], np.float32),
        )
    os.replace(temporary, path)


def read(path: Path) -> list[Example]:
    """Read the examples of a file."""
    with np.load(path) as file:
        parts = {name: file[name] for name in file.files}
    frames, tokens = np.cumsum(parts["frames"]), np.cumsum(parts["lengths"])
    features = np.split(parts["features"], frames[:-1], axis=1)
    phonemes = np.split(parts["phonemes"], frames[:-1] // 2)
    return [
        Example(
            features=features[i],
            peak=float(parts["peaks"][i]),
            tokens=tuple(parts["tokens"][end - length : end].tolist()),
            spans=tuple(map(tuple, parts["spans"][end - length : end].tolist())),
            phonemes=phonemes[i],
        )
        for i, (end, length) in enumerate(
            zip(tokens.tolist(), parts["lengths"].tolist(), strict=True)
        )
    ]


class Shards:
    """Write and read shard files in `folder`, by worker processes after `start`."""

    def __init__(self, recipe: Recipe, tokenizer: WhisperTokenizer, folder: Path) -> None:
        self.recipe, self.tokenizer, self.folder = recipe, tokenizer, folder
        self.makers: list[BaseProcess] = []
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, shard: int) -> Path:
        """Return the file of a shard."""
        return self.folder / f"{self.recipe.seed}-{shard:05d}.npz"

    def make(self, shard: int) -> None:
        """Write one shard."""
        first = shard * self.recipe.shard
        clips = (
            asr_data.training_clip(self.recipe, index)
            for index in range(first, first + self.recipe.shard)
        )
        write(self.path(shard), [asr_data.example(clip, self.tokenizer) for clip in clips])

    def visit(self, visit: int) -> list[Example]:
        """Return the examples of a visit, after waiting for its shard or writing it.

        Deletes the shards that no later visit reads.
        """
        shard, earlier_uses = shard_of_visit(self.recipe, visit)
        group = shard // self.recipe.group * self.recipe.group
        for old in range(max(0, group - 3 * self.recipe.group), group):
            self.path(old).unlink(missing_ok=True)
        if self.makers:
            self.wanted.value = self._next_new_shard(visit)
        while not self.path(shard).exists():
            if not earlier_uses and self.makers and all(maker.is_alive() for maker in self.makers):
                time.sleep(0.1)
            else:
                self.make(shard)
        return read(self.path(shard))

    def _next_new_shard(self, visit: int) -> int:
        """Return the shard first read at this visit, or the next such one."""
        shard, earlier_uses = shard_of_visit(self.recipe, visit)
        return (shard // self.recipe.group + 1) * self.recipe.group if earlier_uses else shard

    def start(self, count: int, *, visit: int) -> None:
        """Start `count` worker processes that write AHEAD shards in advance.

        They end with this process.
        """
        context = get_context("spawn")
        self.wanted: Synchronized[int] = context.Value("q", self._next_new_shard(visit))
        for worker in range(count):
            args = (self.recipe, self.tokenizer, self.folder, self.wanted, worker, count)
            maker = context.Process(target=make_shards, args=args, daemon=True)
            maker.start()
            self.makers.append(maker)

    def stop(self) -> None:
        """Terminate the worker processes."""
        for maker in self.makers:
            maker.terminate()
        for maker in self.makers:
            maker.join()
        self.makers = []


def make_shards(
    recipe: Recipe,
    tokenizer: WhisperTokenizer,
    folder: Path,
    wanted: Synchronized[int],
    worker: int,
    workers: int,
) -> None:
    """Write every `workers`th of the shards needed next, until the parent process ends."""
    import torch

    torch.set_num_threads(1)
    shards, parent = Shards(recipe, tokenizer, folder), os.getppid()
    while os.getppid() == parent:
        first = wanted.value
        missing = (i for i in range(first, first + AHEAD) if not shards.path(i).exists())
        shard = next((i for i in missing if i % workers == worker), None)
        if shard is None or is_suspended(parent):
            time.sleep(0.3)
        else:
            shards.make(shard)


def is_suspended(process: int) -> bool:
    """Return True if a signal has stopped the process; its workers then pause too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False
