"""Keep packed models in a folder of bounded size, so that a model is packed once and not per start.

A file belongs to one checkpoint in one state, one format and one version of the code that packs; any
change of these makes it useless, and the least recently used files are deleted. The cache never
fails a load: what cannot be read is packed again, what cannot be written is not kept.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import transformers

import motet_kernels
import motet_llm
from motet_kernels.runtime.errors import KernelError
from motet_models.checkpoints.derived import cache_root
from motet_shared.process.memory_turn import MemoryTurn

from .packed_file import SCHEMA, PackedFileError, PackedModel, PackedReading, write_packed

log = logging.getLogger(__name__)

# Less than this is packed in less than half a second.
SMALLEST = 16 << 20
# Share of the file system that stays free.
_FREE_SHARE = 0.05
_ABANDONED = 3600.0  # seconds after which an unfinished file is that of a dead process
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_END = ".packed"
_CODE = (".py", ".cpp", ".h")
_FAILURES = (OSError, KernelError)


class PackedCache:
    """Find and keep packed models in a private folder of at most `limit` bytes."""

    def __init__(self, limit: int):
        self.folder, self.limit = cache_root() / "packed", limit

    def begin(self, key: str, turn: MemoryTurn | None = None) -> PackedReading | None:
        """Begin to read the model that is kept under a key of `key_of`; None if there is none.

        turn: waited for before memory is taken.
        """
        path = self._path(key)
        try:
            if not path.exists():
                return None
            self._check_folder()
            found = PackedReading(path, key, turn)
        except (OSError, PackedFileError) as error:
            self.discard(key, error)
            return None
        with suppress(OSError):
            os.utime(path)  # the most recently used
        return found

    def discard(self, key: str, reason: Exception) -> None:
        """Delete what is kept under a key, with a log line that gives the reason."""
        log.warning("packed weights are not used", extra={"reason": str(reason)})
        with suppress(OSError):
            self._path(key).unlink()

    def keep(self, key: str, model: PackedModel) -> bool:
        """Write a model's matrices to the folder; return False, with a log line, if that fails."""
        try:
            self._write(key, model)
        except _FAILURES as error:
            # A container's file system is read-only on purpose.
            expected = getattr(error, "errno", None) in (errno.EROFS, errno.EACCES)
            level = logging.INFO if expected else logging.WARNING
            log.log(level, "packed weights are not kept", extra={"reason": str(error)})
            return False
        log.info("packed weights kept", extra={"bytes": model.nbytes, "folder": str(self.folder)})
        return True

    def keep_later(self, key: str, model: PackedModel) -> Thread | None:
        """Write a model's matrices, which must not change any more, on a thread of its own.

        Returns None for a model that is too small or too large to be kept.
        """
        if not SMALLEST <= model.nbytes <= self.limit:
            return None
        thread = Thread(target=self.keep, args=(key, model), name="packed-cache", daemon=True)
        thread.start()
        return thread

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_END}"

    def _check_folder(self) -> None:
        state = self.folder.stat()
        if state.st_uid != os.geteuid() or state.st_mode & 0o022:
            raise PackedFileError(f"{self.folder}: must be of this user, and of mode 0700")

    def _write(self, key: str, model: PackedModel) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._check_folder()
        except PackedFileError as error:
            raise OSError(str(error)) from error
        with self._locked():
            self._make_room(model.nbytes)
        handle, name = tempfile.mkstemp(prefix=".part-", dir=self.folder)
        os.close(handle)
        part = Path(name)
        part.unlink()
        try:
            write_packed(part, key, model)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(part, self._path(key))
        finally:
            part.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, nbytes: int) -> None:
        """Delete the least recently used files until `nbytes` fit. Raises OSError if they do not."""
        now = time.time()
        for part in self.folder.glob(".part-*"):
            if now - part.stat().st_mtime > _ABANDONED:
                part.unlink(missing_ok=True)
        kept = sorted(
            ((path.stat(), path) for path in self.folder.glob("[!.]*")),
            key=lambda both: both[0].st_mtime_ns,
        )
        total = sum(state.st_size for state, _ in kept)
        for state, path in kept:
            if total + nbytes <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= state.st_size
        disk = shutil.disk_usage(self.folder)
        if disk.free - nbytes < disk.total * _FREE_SHARE:
            raise OSError(f"{self.folder}: {disk.free} bytes are free, too few for {nbytes} more")


# --------------------------------------------------------------------------------------------- keys
def key_of(folder: Path, **settings: Any) -> str:
    """Return the key of a checkpoint in its present state, packed with these settings.

    Raises OSError if its files cannot be read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
    about = {
        "schema": SCHEMA,
        "code": code_digest(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        "files": [_state_of(path) for path in files],
        "settings": settings,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _state_of(path: Path) -> list[str | int]:
    """Return what changes with a file's content: a hub names its blobs by their hash.

    The time of the last change of any other file cannot be set back, unlike that of its content.
    """
    real = path.resolve()
    state = real.stat()
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return [path.name, real.name, state.st_size]
    return [path.name, str(real), state.st_size, state.st_mtime_ns, state.st_ctime_ns]


@cache
def code_digest() -> str:
    """Return a hash of the code that reads, packs and stores weights, and that replaces modules."""
    roots = [
        Path(motet_kernels.__file__).parent,
        *(
            Path(motet_llm.__file__).parent / part
            for part in ("attention", "models", "stages", "weights")
        ),
    ]
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(path for path in root.rglob("*") if path.suffix in _CODE):
            digest.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
