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
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError


def cache_root() -> Path:
    """Return `$MOTET_CACHE`, by default ~/.cache/motet."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet")


def default_target(kind: str, source: Path) -> Path:
    """Return the place for what is derived of a file or folder, by the path of that."""
    path = absolute(source)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return cache_root() / kind / f"{path.stem if path.is_file() else path.name}-{digest}"


def absolute(path: Path) -> Path:
    """Return the path with its own name: in a hub's cache files are links to blobs."""
    return Path(os.path.abspath(path.expanduser()))


def derive(
    sources: Sequence[Path],
    target: Path,
    write: Callable[[Path], None],
    *,
    stamp_name: str,
    version: int,
) -> Path:
    """Have `write` fill the folder `target`, unless it was made of the same `sources`; return it.

    stamp_name: file with the stamp, which tells what kind of folder it is. version: of the
    conversion. Raises ConfigError if a source cannot be read, or `target` cannot be written or is
    something else.
    """
    stamp = _stamp(sources, version)
    if _read_stamp(target / stamp_name) == stamp:
        return target
    if target.exists() and _read_stamp(target / stamp_name) is None:
        raise ConfigError(f"{target} is there and has no {stamp_name}; give another place")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
            made = Path(place) / "made"
            made.mkdir()
            write(made)
            (made / stamp_name).write_text(json.dumps(stamp))
            _put(made, target, stamp_name, stamp)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}; give another place") from error
    return target


def _put(made: Path, target: Path, stamp_name: str, stamp: dict[str, Any]) -> None:
    """Move a folder to its place. Another process may have been faster: then its folder stays."""
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.rename(made, target)
    except OSError:
        if _read_stamp(target / stamp_name) != stamp:
            raise


def _stamp(sources: Sequence[Path], version: int) -> dict[str, Any]:
    try:
        states = [source.stat() for source in sources]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
    files = [
        [str(source), state.st_size, state.st_mtime_ns]
        for source, state in zip(sources, states, strict=True)
    ]
    return {"version": version, "files": files}


def _read_stamp(path: Path) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return stamp
