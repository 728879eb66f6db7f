"""Cache what benchmarks generate, such as checkpoints, in folders that are always complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder `bench` of MOTET_CACHE, which defaults to ~/.cache/motet."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet") / "bench"


def made(folder: Path, make: Callable[[Path], object], *, mark: str = "config.json") -> Path:
    """Return `folder`, generated atomically by `make` unless it exists.

    mark: a file in the folder that marks it as complete.
    """
    if (folder / mark).is_file():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    make(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process has generated it meanwhile
        shutil.rmtree(unfinished)
    return folder
