"""Keep blocks evicted from the pool in host memory, then on disk, until a prompt needs them again.

Each copy has a checksum: what is loaded is what was stored, or nothing. A block is kept only if
copying it back costs less than computing its tokens again; both speeds are measured.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from motet_shared.errors import InternalError

log = logging.getLogger(__name__)

HOST, DISK = 0, 1  # the tiers


class CopySpeed:
    """Average the seconds per byte of copies (exponential, weight 0.1); 0 before the first."""

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0

    def note(self, seconds: float, nbytes: int) -> None:
        now = seconds / max(nbytes, 1)
        self.seconds_per_byte = (
            now if not self.seconds_per_byte else 0.9 * self.seconds_per_byte + 0.1 * now
        )


@dataclass(slots=True, frozen=True)
class _Copy:
    """Locate a block's bytes: in memory, or in a file."""

    content: Tensor | Path
    nbytes: int
    checksum: int


class Offload:
    """Keep two tiers of bounded size; each drops its least recently used copy, memory to disk.

    host_bytes, disk_bytes: sizes of the tiers; 0: none.
    folder: where the disk tier makes its own folder, which `close` removes.
    recompute_seconds(): seconds to compute a block of that size again; 0 while unknown.
    on_drop(key): called when the last copy of a block is gone.

    Room may be reserved for bytes that are kept elsewhere (`Spill`).
    """

    def __init__(
        self,
        host_bytes: int,
        disk_bytes: int = 0,
        folder: Path | None = None,
        recompute_seconds: Callable[[], float] = lambda: 0.0,
        on_drop: Callable[[Hashable], None] = lambda key: None,
    ):
        self._on_drop = on_drop
        self.damaged = 0
        self.loads = 0
        self.limits = (host_bytes, disk_bytes)
        self._reserved = [0, 0]
        self._tiers: tuple[OrderedDict[Hashable, _Copy], ...] = (OrderedDict(), OrderedDict())
        self._used = [0, 0]
        self._speeds = (CopySpeed(), CopySpeed())
        self._recompute_seconds = recompute_seconds
        self._files = 0
        self._folder = (
            tempfile.TemporaryDirectory(dir=folder, prefix="motet-kv-") if disk_bytes else None
        )

    def __contains__(self, key: Hashable) -> bool:
        return any(key in tier for tier in self._tiers)

    @property
    def host_bytes(self) -> int:
        return self._used[HOST]

    @property
    def disk_bytes(self) -> int:
        return self._used[DISK]

    @property
    def folder(self) -> Path:
        """Return the folder of the disk tier. Raises InternalError if there is none."""
        if self._folder is None:
            raise InternalError("there is no disk tier, and hence no folder")
        return Path(self._folder.name)

    def reserved(self, tier: int) -> int:
        """Return the bytes of a tier that are reserved."""
        return self._reserved[tier]

    def unreserved(self, tier: int) -> int:
        """Return the bytes of a tier that are left for copies and may still be reserved."""
        return self.limits[tier] - self._reserved[tier]

    def reserve(self, tier: int, nbytes: int) -> None:
        """Reserve bytes of a tier until `unreserve`. Raises InternalError if fewer are left."""
        if nbytes > self.unreserved(tier):
            raise InternalError(
                f"reserve({tier}, {nbytes}): only {self.unreserved(tier)} bytes are unreserved"
            )
        self._reserved[tier] += nbytes
        self._shrink(tier)

    def unreserve(self, tier: int, nbytes: int) -> None:
        self._reserved[tier] -= nbytes

    def store(self, key: Hashable, read: Callable[[], Tensor]) -> None:
        """Keep a copy of `read()` (`uint8`), unless one exists or computing it again is cheaper."""
        if key in self:
            return
        started = time.perf_counter()
        content = read()
        copy = _Copy(content, content.nbytes, _checksum(content))
        self._speeds[HOST].note(time.perf_counter() - started, content.nbytes)
        if self._is_worth(HOST, content.nbytes):
            self._put(HOST, key, copy)

    def _is_worth(self, tier: int, nbytes: int) -> bool:
        """Return True if loading the copy is cheaper than computing the block again.

        Loading (a copy and its verification) is taken to cost as much as storing.
        """
        recompute_seconds = self._recompute_seconds()
        return (
            not recompute_seconds
            or self._speeds[tier].seconds_per_byte * nbytes <= recompute_seconds
        )

    def _put(self, tier: int, key: Hashable, copy: _Copy) -> None:
        if copy.nbytes > self.unreserved(tier):
            self._fall(tier, key, copy)
            return
        # Insert before shrinking: callbacks of dropped copies may look this one up.
        self._tiers[tier][key] = copy
        self._used[tier] += copy.nbytes
        self._shrink(tier)

    def _shrink(self, tier: int) -> None:
        while self._used[tier] > self.unreserved(tier):
            old, oldest = self._tiers[tier].popitem(last=False)
            self._used[tier] -= oldest.nbytes
            self._fall(tier, old, oldest)

    def _fall(self, tier: int, key: Hashable, copy: _Copy) -> None:
        """Move a copy from memory to disk, or drop it."""
        if (
            tier == HOST
            and self.unreserved(DISK) >= copy.nbytes
            and self._is_worth(DISK, copy.nbytes)
        ):
            written = self._write(copy)
            if written is not None:
                self._put(DISK, key, written)
                return
        _remove(copy)
        self._on_drop(key)

    def _write(self, copy: _Copy) -> _Copy | None:
        if self._folder is None or isinstance(copy.content, Path):
            return None
        path = Path(self._folder.name) / f"{self._files}.kv"
        self._files += 1
        started = time.perf_counter()
        try:
            path.write_bytes(copy.content.numpy().data)
        except OSError as error:
            log.warning(
                "a block could not be written to disk and is dropped", extra={"reason": str(error)}
            )
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        self._speeds[DISK].note(time.perf_counter() - started, copy.nbytes)
        return _Copy(path, copy.nbytes, copy.checksum)

    def load(self, key: Hashable) -> Tensor | None:
        """Return the bytes stored under `key`, or None; a copy that is damaged is dropped."""
        tier = next((t for t, copies in enumerate(self._tiers) if key in copies), None)
        if tier is None:
            return None
        copy = self._tiers[tier][key]
        content = _read(copy)
        if content is None:
            self.damaged += 1
            log.warning("a damaged block is computed again", extra={"tier": ("host", "disk")[tier]})
            self.forget(key)
            return None
        self._tiers[tier].move_to_end(key)
        self.loads += 1
        return content

    def forget(self, key: Hashable) -> None:
        """Drop the copy of a block, if there is one."""
        for tier, copies in enumerate(self._tiers):
            copy = copies.pop(key, None)
            if copy is not None:
                self._used[tier] -= copy.nbytes
                _remove(copy)
                self._on_drop(key)

    def stats(self) -> dict[str, float]:
        """Return the bytes of both tiers, and counts of copies loaded and found damaged."""
        return {
            "host_cache_bytes": self.host_bytes,
            "disk_cache_bytes": self.disk_bytes,
            "blocks_loaded": self.loads,
            "blocks_damaged": self.damaged,
        }

    def close(self) -> None:
        """Drop all copies and remove the folder."""
        for tier, copies in enumerate(self._tiers):
            copies.clear()
            self._used[tier] = 0
        if self._folder is not None:
            self._folder.cleanup()


def _checksum(content: Tensor) -> int:
    return zlib.crc32(content.numpy().data)


def _remove(copy: _Copy) -> None:
    """Delete the copy's file. If that fails (a directory), it is logged and left to `close`."""
    if not isinstance(copy.content, Path):
        return
    try:
        copy.content.unlink(missing_ok=True)
    except OSError as error:
        log.warning(
            "a file of the disk cache cannot be removed and is left", extra={"reason": str(error)}
        )


def _read(copy: _Copy) -> Tensor | None:
    if isinstance(copy.content, Path):
        try:
            content = torch.from_numpy(np.fromfile(copy.content, np.uint8, copy.nbytes))
        except OSError:
            return None
    else:
        content = copy.content
    return (
        content if content.nbytes == copy.nbytes and _checksum(content) == copy.checksum else None
    )
