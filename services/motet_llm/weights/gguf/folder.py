"""Make the checkpoint folder that a lone GGUF file stands for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from motet_kernels.runtime.build import cache_root
from motet_shared.errors import ConfigError

from .config import config_of
from .header import Header, parts_of, read_header
from .tokenizer import build_tokenizer, end_ids

_STAMP = "gguf_source.json"  # says of which file, in which state, the folder was made
# Bumped when folders that older versions have made are to be made again.
_VERSION = 1
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def default_folder(file: Path) -> Path:
    """Return the place for the folder of a file: under the cache, by the file's path."""
    path = _absolute(file)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return cache_root() / "gguf" / f"{path.stem}-{digest}"


def make_folder(file: Path, target: Path) -> Path:
    """Make a checkpoint folder of a file at `target`, and return it.

    A folder that was made of the same file is kept; several processes may do this at once. Raises
    ConfigError if the file cannot be served, or `target` cannot be written or is something else.
    """
    parts = parts_of(_absolute(file))
    stamp = _stamp(parts)
    if _read_stamp(target) == stamp:
        return target
    if target.exists() and _read_stamp(target) is None:
        raise ConfigError(f"{target} is there and not a folder of a GGUF file; give another place")
    header = read_header(parts[0])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
            made = Path(place) / "made"
            made.mkdir()
            _write(header, made)
            for part in parts:
                (made / part.name).symlink_to(part)
            (made / _STAMP).write_text(json.dumps(stamp))
            _put(made, target, stamp)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}; give another place") from error
    return target


def _absolute(file: Path) -> Path:
    """Return the file's path with its own name: in a hub's cache that is a link to a blob."""
    return Path(os.path.abspath(file.expanduser()))


def _write(header: Header, folder: Path) -> None:
    """Write all files but the link."""
    (folder / "config.json").write_text(json.dumps(config_of(header), indent=1))
    (folder / "generation_config.json").write_text(json.dumps(_generation(header), indent=1))
    build_tokenizer(header).save_pretrained(folder)


def _generation(header: Header) -> dict[str, Any]:
    """Return generation_config.json: what ends a reply, and the sampling that the file recommends."""
    found: dict[str, Any] = {"eos_token_id": end_ids(header)} if end_ids(header) else {}
    for theirs, ours in _SAMPLING.items():
        value = header.fields.get(f"general.sampling.{theirs}")
        if isinstance(value, int | float):
            found |= {ours: value, "do_sample": True}
    return found


def _put(made: Path, target: Path, stamp: dict[str, Any]) -> None:
    """Move a folder to its place. Another process may have been faster: then its folder stays."""
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.rename(made, target)
    except OSError:
        if _read_stamp(target) != stamp:
            raise


def _stamp(parts: list[Path]) -> dict[str, Any]:
    try:
        states = [part.stat() for part in parts]
    except OSError as error:
        raise ConfigError(f"{parts[0]} cannot be read: {error}; give a GGUF file") from error
    files = [
        [str(part), state.st_size, state.st_mtime_ns]
        for part, state in zip(parts, states, strict=True)
    ]
    return {"version": _VERSION, "files": files}


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    try:
        stamp: dict[str, Any] = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp
