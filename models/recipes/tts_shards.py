"""The examples of pocket-tts in files, each a function of (recipe, number): spoken once, read by all trainings."""

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
from tts_data import PAUSE, Example, Sound, example, training_line
from tts_recipe import Recipe


def write(path: Path, examples: Sequence[Example]) -> None:
    """All examples in one file, arrays end to end; bands and samples in 16 bits."""
    about = [
        {
            "text": one.text,
            "voice": one.voice,
            "rate": one.rate,
            "sounds": one.sounds,
            "frames": len(one.features),
        }
        for one in examples
    ]
    heard = [one.samples.clamp(-1, 1) for one in examples if one.samples is not None]
    fresh = path.with_suffix(f".{os.getpid()}")
    with fresh.open("wb") as file:
        np.savez(
            file,
            about=np.array(json.dumps(about)),
            features=torch.cat([one.features for one in examples]).half().numpy(),
            samples=(torch.cat(heard) * 32767).short().numpy() if heard else np.zeros(0, np.int16),
        )
    os.replace(fresh, path)


def read(path: Path) -> list[Example]:
    """The examples as they were written."""
    with np.load(path) as file:
        about, features, samples = json.loads(str(file["about"])), file["features"], file["samples"]
    ends = np.cumsum([one["frames"] for one in about])
    parts = np.split(features, ends[:-1])
    heard = (
        np.split(samples, ends[:-1] * (len(samples) // ends[-1]))
        if len(samples)
        else [None] * len(about)
    )
    return [
        Example(
            text=one["text"],
            voice=one["voice"],
            rate=one["rate"],
            sounds=tuple(Sound(*sound) for sound in one["sounds"]),
            features=torch.from_numpy(part).float(),
            samples=None if said is None else torch.from_numpy(said).float() / 32767,
        )
        for one, part, said in zip(about, parts, heard, strict=True)
    ]


def make(recipe: Recipe, config: PocketConfig, folder: Path, shard: int) -> None:
    """Speak the sentences of one file; the first files keep their samples."""
    first, path = shard * recipe.shard, where(recipe, folder, shard)
    made = [example(config, training_line(recipe, i)) for i in range(first, first + recipe.shard)]
    silent = shard >= recipe.sounding
    write(path, [one.silent() for one in made] if silent else made)


def where(recipe: Recipe, folder: Path, shard: int) -> Path:
    return folder / f"{recipe.seed}-{shard:04d}.npz"


class Shards:
    """The files of a recipe in `folder`; `makers` processes speak those that are missing."""

    def __init__(self, recipe: Recipe, folder: Path, *, makers: int = 0) -> None:
        self.recipe, self.folder, self.makers = recipe, folder, makers
        folder.mkdir(parents=True, exist_ok=True)

    def fill(self) -> None:
        """Make what is missing. The sizes that the files depend on are the defaults of `PocketConfig`."""
        missing = [
            i for i in range(self.recipe.shards) if not where(self.recipe, self.folder, i).exists()
        ]
        work = partial(make, self.recipe, PocketConfig(), self.folder)
        if not self.makers:
            for shard in missing:
                work(shard)
            return
        with get_context("spawn").Pool(
            self.makers, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            for done, _ in enumerate(pool.imap(work, missing), start=1):
                print(json.dumps({"shards": len(missing), "made": done}), flush=True)

    def inventory(self) -> tuple[str, ...]:
        """The phonemes that occur, silence first."""
        names: set[str] = set()
        for shard in range(self.recipe.shards):
            with np.load(where(self.recipe, self.folder, shard)) as file:
                names |= {
                    name for one in json.loads(str(file["about"])) for name, _, _ in one["sounds"]
                }
        return (PAUSE, *sorted(names - {PAUSE}))

    def __iter__(self) -> Iterator[list[Example]]:
        return self._read(self.recipe.shards)

    def sounding(self) -> Iterator[list[Example]]:
        """The files whose examples have samples."""
        return self._read(min(self.recipe.sounding, self.recipe.shards))

    def _read(self, count: int) -> Iterator[list[Example]]:
        for shard in range(count):
            yield read(where(self.recipe, self.folder, shard))
