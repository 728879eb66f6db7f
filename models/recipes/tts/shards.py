"""Store pocket-tts examples in files, each a function of (recipe, number)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from motet_tts.pocket.config import PocketConfig
from recipes.tts.data import PAUSE, Example, TimedPhoneme, example, training_recording
from recipes.tts.recipe import Recipe


def write(path: Path, examples: Sequence[Example]) -> None:
    """Write examples to one file, with their arrays concatenated in 16 bits."""
    about = [
        {
            "text": one.text,
            "voice": one.voice,
            "rate": one.rate,
            "phonemes": one.phonemes,
            "frames": len(one.features),
        }
        for one in examples
    ]
    samples = [one.samples.clamp(-1, 1) for one in examples if one.samples is not None]
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(
            file,
            about=np.array(json.dumps(about)),
            features=torch.cat([one.features for one in examples]).half().numpy(),
            samples=(torch.cat(samples) * 32767).short().numpy()
            if samples
            else np.zeros(0, np.int16),
        )
    os.replace(temporary, path)


def read(path: Path) -> list[Example]:
    """Read the examples of a file."""
    with np.load(path) as file:
        about, features, samples = json.loads(str(file["about"])), file["features"], file["samples"]
    ends = np.cumsum([one["frames"] for one in about])
    parts = np.split(features, ends[:-1])
    recordings = (
        np.split(samples, ends[:-1] * (len(samples) // ends[-1]))
        if len(samples)
        else [None] * len(about)
    )
    return [
        Example(
            text=one["text"],
            voice=one["voice"],
            rate=one["rate"],
            phonemes=tuple(TimedPhoneme(*phoneme) for phoneme in one["phonemes"]),
            features=torch.from_numpy(part).float(),
            samples=None if pcm is None else torch.from_numpy(pcm).float() / 32767,
        )
        for one, part, pcm in zip(about, parts, recordings, strict=True)
    ]


def make(recipe: Recipe, config: PocketConfig, folder: Path, shard: int) -> None:
    """Write the sentences of one file; the first `codec_shards` files keep their samples."""
    first, path = shard * recipe.shard, shard_path(recipe, folder, shard)
    made = [
        example(config, training_recording(recipe, i)) for i in range(first, first + recipe.shard)
    ]
    without_samples = shard >= recipe.codec_shards
    write(path, [one.without_samples() for one in made] if without_samples else made)


def shard_path(recipe: Recipe, folder: Path, shard: int) -> Path:
    """Return the path of a file."""
    return folder / f"{recipe.seed}-{shard:04d}.npz"


class Shards:
    """Write and read the files of a recipe in `folder`, with `makers` worker processes."""

    def __init__(self, recipe: Recipe, folder: Path, *, makers: int = 0) -> None:
        self.recipe, self.folder, self.makers = recipe, folder, makers
        folder.mkdir(parents=True, exist_ok=True)

    def fill(self) -> None:
        """Write the missing files, with the sizes that `PocketConfig` has by default."""
        missing = [
            i
            for i in range(self.recipe.shards)
            if not shard_path(self.recipe, self.folder, i).exists()
        ]
        make_shard = partial(make, self.recipe, PocketConfig(), self.folder)
        if not self.makers:
            for shard in missing:
                make_shard(shard)
            return
        with get_context("spawn").Pool(
            self.makers, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            for done, _ in enumerate(pool.imap(make_shard, missing), start=1):
                print(json.dumps({"shards": len(missing), "made": done}), flush=True)

    def inventory(self) -> tuple[str, ...]:
        """Return the phonemes that occur, the pause first."""
        names: set[str] = set()
        for shard in range(self.recipe.shards):
            with np.load(shard_path(self.recipe, self.folder, shard)) as file:
                names |= {
                    name for one in json.loads(str(file["about"])) for name, _, _ in one["phonemes"]
                }
        return (PAUSE, *sorted(names - {PAUSE}))

    def __iter__(self) -> Iterator[list[Example]]:
        """Yield the examples of every file."""
        return self._read(self.recipe.shards)

    def with_samples(self) -> Iterator[list[Example]]:
        """Yield the examples of the files that keep samples."""
        return self._read(min(self.recipe.codec_shards, self.recipe.shards))

    def _read(self, count: int) -> Iterator[list[Example]]:
        for shard in range(count):
            yield read(shard_path(self.recipe, self.folder, shard))
