"""Where benchmarks keep what takes long to make, and that each piece of it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """`bench` in MOTET_CACHE, by default ~/.cache/motet."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet") / "bench"


def made(folder: Path, make: Callable[[Path], object], *, mark: str = "config.json") -> Path:
    """The folder, made in one piece if it is not there yet. `mark`: a file that it holds."""
    if (folder / mark).is_file():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    make(unfinished)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(unfinished)
    return folder
