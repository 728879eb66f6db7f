"""Training examples in files: made once, ahead of the trainer, gone through a few times, then deleted.

The order is fixed: `recipe.group` shards are used in the order of their making, then again in other orders, and the
next group follows. A shard is a function of (recipe, index), so a file that is lost is simply made again.
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

import asr_data
from asr_data import Example
from asr_recipe import Recipe
from asr_tokenizer import WhisperTokenizer

AHEAD = 6  # shards


def order(recipe: Recipe, visit: int) -> tuple[int, int]:
    """The shard of the visit number `visit`, and how often it was used before."""
    per_group = recipe.group * recipe.passes
    group, place = divmod(visit, per_group)
    again, place = divmod(place, recipe.group)
    places = list(range(recipe.group))
    if again:
        Random(f"{recipe.seed}/{group}/{again}").shuffle(places)
    return group * recipe.group + places[place], again


def write(path: Path, examples: Sequence[Example]) -> None:
    """All examples in one file, arrays end to end."""
    fresh = path.with_suffix(f".{os.getpid()}")
    with fresh.open("wb") as file:
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
    os.replace(fresh, path)


def read(path: Path) -> list[Example]:
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
    """The files in `folder`; `start` lets processes of their own make them ahead of their use."""

    def __init__(self, recipe: Recipe, tokenizer: WhisperTokenizer, folder: Path) -> None:
        self.recipe, self.tokenizer, self.folder = recipe, tokenizer, folder
        self.makers: list[BaseProcess] = []
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, shard: int) -> Path:
        return self.folder / f"{self.recipe.seed}-{shard:05d}.npz"

    def make(self, shard: int) -> None:
        first = shard * self.recipe.shard
        clips = (
            asr_data.clip(self.recipe, index) for index in range(first, first + self.recipe.shard)
        )
        write(self.path(shard), [asr_data.example(clip, self.tokenizer) for clip in clips])

    def visit(self, visit: int) -> list[Example]:
        """The examples of a visit, waiting for them or making them; forgets those that no later visit uses."""
        shard, again = order(self.recipe, visit)
        group = shard // self.recipe.group * self.recipe.group
        for old in range(max(0, group - 3 * self.recipe.group), group):
            self.path(old).unlink(missing_ok=True)
        if self.makers:
            self.wanted.value = self._fresh(visit)
        while not self.path(shard).exists():
            if not again and self.makers and all(maker.is_alive() for maker in self.makers):
                time.sleep(0.1)
            else:
                self.make(shard)
        return read(self.path(shard))

    def _fresh(self, visit: int) -> int:
        """The shard that is new at this visit or the next new one after it."""
        shard, again = order(self.recipe, visit)
        return (shard // self.recipe.group + 1) * self.recipe.group if again else shard

    def start(self, count: int, *, visit: int) -> None:
        """Let `count` processes make a few shards more than are needed so far; they end with this one."""
        context = get_context("spawn")
        self.wanted: Synchronized[int] = context.Value("q", self._fresh(visit))
        for worker in range(count):
            args = (self.recipe, self.tokenizer, self.folder, self.wanted, worker, count)
            maker = context.Process(target=work, args=args, daemon=True)
            maker.start()
            self.makers.append(maker)

    def stop(self) -> None:
        for maker in self.makers:
            maker.terminate()
        for maker in self.makers:
            maker.join()
        self.makers = []


def work(
    recipe: Recipe,
    tokenizer: WhisperTokenizer,
    folder: Path,
    wanted: Synchronized[int],
    worker: int,
    workers: int,
) -> None:
    """Make every `workers`th of the shards that are new soon, in order, for as long as needed."""
    import torch

    torch.set_num_threads(1)
    shards, parent = Shards(recipe, tokenizer, folder), os.getppid()
    while os.getppid() == parent:
        first = wanted.value
        missing = (i for i in range(first, first + AHEAD) if not shards.path(i).exists())
        mine = next((i for i in missing if i % workers == worker), None)
        if mine is None or suspended(parent):
            time.sleep(0.3)
        else:
            shards.make(mine)


def suspended(process: int) -> bool:
    """Whether the process was stopped by a signal: then its makers rest as well."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False
