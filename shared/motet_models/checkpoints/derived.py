"""Make a checkpoint folder out of other files, once, and keep it under a cache.

A derived folder has a stamp that says of which files, in which state, it was made, and by which
version of the conversion; as long as that holds, it is used as it is. Several processes may make it
at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError


def cache_root() -> Path:
    """Return `$MOTET_CACHE`, by default ~/.cache/motet."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet")


def absolute(path: Path) -> Path:
    """Return the path with its own name: in a hub's cache files are links to blobs."""
    return Path(os.path.abspath(path.expanduser()))


def files_of(folder: Path) -> list[Path]:
    """Return the files in a folder, sorted."""
    return sorted(path for path in absolute(folder).iterdir() if path.is_file())


@dataclass(frozen=True, slots=True)
class Derivation:
    """Define a kind of derived folders.

    kind: name of their parent in the cache.
    version: of the conversion; a folder that another version has made is made again.
    """

    kind: str
    version: int

    @property
    def stamp_name(self) -> str:
        """Return the name of the stamp file, which marks these folders."""
        return f"{self.kind}_source.json"

    def target(self, source: Path) -> Path:
        """Return the folder for what is derived of a file or folder, by the path of that."""
        path = absolute(source)
        digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
        return cache_root() / self.kind / f"{path.stem if path.is_file() else path.name}-{digest}"

    def find(self, source: Path) -> Path | None:
        """Return the folder of a file or folder if it is there and current, else None.

        Other parts of a split file are those that the stamp lists.
        """
        target = self.target(source)
        stamp = self._read_stamp(target)
        if stamp is None:
            return None
        files = [Path(name) for name, *_ in stamp["files"]]
        if source.is_dir() and files != files_of(source):
            return None
        try:
            return target if self._stamp(files) == stamp else None
        except ConfigError:  # one of them is gone
            return None

    def make(self, sources: Sequence[Path], target: Path, write: Callable[[Path], None]) -> Path:
        """Have `write` fill the folder `target`, unless it was made of the same `sources`.

        Returns `target`. Raises ConfigError if a source cannot be read, or `target` cannot be
        written or is something else.
        """
        stamp, found = self._stamp(sources), self._read_stamp(target)
        if found == stamp:
            return target
        if target.exists() and found is None:
            raise ConfigError(f"{target} exists and has no {self.stamp_name}; give another folder")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
                made = Path(place) / "made"
                made.mkdir()
                write(made)
                (made / self.stamp_name).write_text(json.dumps(stamp))
                self._put(made, target, stamp)
        except OSError as error:
            raise ConfigError(
                f"{target} cannot be written: {error}; give another folder"
            ) from error
        return target

    def _put(self, made: Path, target: Path, stamp: dict[str, Any]) -> None:
        """Move a folder to its place. Another process may have been faster: then its folder stays."""
        if target.exists():
            shutil.rmtree(target, ignore_errors=True)
        try:
            os.rename(made, target)
        except OSError:
            if self._read_stamp(target) != stamp:
                raise

    def _stamp(self, sources: Sequence[Path]) -> dict[str, Any]:
        try:
            states = [source.stat() for source in sources]
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
        files = [
            [str(source), state.st_size, state.st_mtime_ns]
            for source, state in zip(sources, states, strict=True)
        ]
        return {"version": self.version, "files": files}

    def _read_stamp(self, folder: Path) -> dict[str, Any] | None:
        try:
            stamp: dict[str, Any] = json.loads((folder / self.stamp_name).read_text())
        except (OSError, ValueError):
            return None
        return stamp


# A GGUF file as a folder; a checkpoint with a tokenizer.json made of its vocabulary.
GGUF = Derivation("gguf", version=1)
TOKENIZER = Derivation("tokenizer", version=1)
