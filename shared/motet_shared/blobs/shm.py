"""Create, attach and remove shared-memory segments of blobs.

A segment is a file in /dev/shm, mapped by its owner for writing and by readers for reading: header,
key table, bytes. It is found by name, takes memory from its beginning on, in steps, as its owner
needs it, and is removed when its owner is gone. `blobs.lease` decides which reader may read what,
and when a range is reused.

A reader finds the key of its blob in the table, copies the bytes, and checks the table again: the
owner erases an entry before the bytes are overwritten, and keys are never reused, so bytes of
another blob are never taken for the requested ones. `multiprocessing.shared_memory` is not used:
before Python 3.13 its resource tracker removes segments that a reader merely attached to. An owner
is known to be alive by its file lock, which the kernel releases when the process ends and which
works across containers, where pids do not.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from motet_shared.blobs.buffer import copy
from motet_shared.errors import BlobError, Overloaded

SHM = Path("/dev/shm")
_NAME = re.compile(r"motet-([a-z0-9]+(?:-[a-z0-9]+)*)-[0-9a-f]{8}")
_KEY = re.compile(r"(\d{1,6})-([0-9a-f]{32})", re.ASCII)
_HEAD = struct.Struct("<8sI")  # magic, entries in the table
_ENTRY = struct.Struct("<16sQQ")  # token (zeros: no blob), offset in the segment, bytes
_MAGIC = b"MotetB01"
_TABLE = 64  # offset of the table
_PAGE = 4096
_GROWTH = 4 << 20  # bytes that a segment grows by, at least
_POPULATE_WRITE = 23  # madvise(2), Linux 5.14; not in Python's mmap yet


class AttachFailed(BlobError):
    """Report that a segment cannot be attached; the owner's TCP server may still be reachable."""


def parse_key(key: str) -> tuple[int, bytes]:
    """Return slot and token of a key; raise BlobError if it is malformed."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise BlobError(f"blob key {key[:60]!r} is malformed")
    return int(match[1]), bytes.fromhex(match[2])


class Segment:
    """Map one segment, by `create` (owner) or `attach` (reader)."""

    def __init__(
        self, name: str, memory: mmap.mmap, slots: int, lock: int | None, path: Path | None
    ):
        self.name, self.slots = name, slots
        self.begin = _begin(slots)  # offset of the first byte after header and table
        self._memory, self._lock, self._path = memory, lock, path
        self._present = 0  # bytes of the file that have memory, for the owner
        self._growing = threading.Lock()

    @classmethod
    def create(cls, instance: str, capacity: int, slots: int, folder: Path | None = SHM) -> Segment:
        """Create a segment for `capacity` bytes; without a folder, unnamed.

        Raises BlobError if the folder has less room than that. `provide` takes the memory.
        """
        name = f"motet-{instance}-{secrets.token_hex(4)}" if folder else ""
        if folder and not _NAME.fullmatch(name):
            raise BlobError(
                f"instance {instance!r} cannot name a segment; use a-z, 0-9 and single hyphens"
            )
        path = folder / name if folder else None
        fd = _new_file(path)
        size = _begin(slots) + capacity
        try:
            if folder is not None and _room(folder) < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.truncate(fd, size)
            segment = cls(name, mmap.mmap(fd, size), slots, fd, path)
            segment._grow(segment.begin)
        except OSError as error:
            _discard(fd, path)
            raise BlobError(
                f"cannot make a blob segment of {size} bytes: {_reason(error, folder)}"
            ) from None
        _HEAD.pack_into(segment._memory, 0, _MAGIC, slots)
        return segment

    @classmethod
    def attach(cls, name: str, folder: Path = SHM) -> Segment:
        """Map another process's segment for reading. Raises AttachFailed."""
        if not _NAME.fullmatch(name):
            raise AttachFailed(f"{name[:80]!r} is not the name of a blob segment")
        try:
            fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            raise AttachFailed(f"cannot attach segment {name}: {error}") from None
        if len(memory) < _TABLE or _HEAD.unpack_from(memory)[0] != _MAGIC:
            raise AttachFailed(f"segment {name} is not one of blobs")
        slots = _HEAD.unpack_from(memory)[1]
        if _begin(slots) > len(memory):
            raise AttachFailed(f"segment {name} is too short for its table of {slots}")
        return cls(name, memory, slots, None, None)

    def provide(self, offset: int, nbytes: int) -> None:
        """Take the memory of the owner's bytes at `offset`, which `view` may then write.

        Raises Overloaded if there is none: written without it, they would cause a bus error.
        """
        end = self.begin + offset + nbytes
        with self._growing:
            if end <= self._present:
                return
            try:
                self._grow(min(max(end, self._present + _GROWTH), len(self._memory)))
            except OSError as error:
                folder = self._path.parent if self._path is not None else None
                raise Overloaded(
                    f"no memory for {nbytes} bytes of blobs: {_reason(error, folder)}"
                ) from None

    def _grow(self, end: int) -> None:
        """Take the memory of the file's bytes up to `end`. Raises OSError."""
        assert self._lock is not None
        end = min(-(-end // _PAGE) * _PAGE, len(self._memory))
        os.posix_fallocate(self._lock, self._present, end - self._present)
        with suppress(OSError):  # older kernels map pages at first touch
            self._memory.madvise(_POPULATE_WRITE, self._present, end - self._present)
        self._present = end

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes at `offset`, counted from the table's end; writable for the owner."""
        return memoryview(self._memory)[self.begin + offset : self.begin + offset + nbytes]

    def publish(self, key: str, offset: int, nbytes: int) -> None:
        """Write the table entry of a blob, so that readers can find it."""
        slot, token = parse_key(key)
        place = _TABLE + slot * _ENTRY.size
        _ENTRY.pack_into(self._memory, place, bytes(16), self.begin + offset, nbytes)
        # written last: a reader that sees the key sees the rest
        self._memory[place : place + 16] = token

    def erase(self, slot: int) -> None:
        """Erase the table entry of a slot."""
        place = _TABLE + slot * _ENTRY.size
        self._memory[place : place + 16] = bytes(16)

    def read(self, key: str, into: memoryview) -> None:
        """Copy the blob `key`, of exactly `len(into)` bytes.

        Raises BlobError, also if the blob was freed during the copy.
        """
        start = self._find(key, len(into))
        copy(into, memoryview(self._memory)[start : start + len(into)])
        if self._find(key, len(into)) != start:
            raise BlobError(f"blob {key} was freed while it was read")

    def _find(self, key: str, nbytes: int) -> int:
        slot, wanted = parse_key(key)
        if slot >= self.slots:
            raise BlobError(f"blob {key} is not in segment {self.name}: it has {self.slots} slots")
        token, start, held = _ENTRY.unpack_from(self._memory, _TABLE + slot * _ENTRY.size)
        if token != wanted:
            raise BlobError(
                f"blob {key} is gone: released, expired, or never in segment {self.name}"
            )
        if held != nbytes or start < self.begin or start + held > len(self._memory):
            raise BlobError(f"blob {key} has {held} bytes, its reference says {nbytes}")
        return int(start)

    def close(self) -> None:
        """Unmap the segment; the owner's segment is also removed.

        A copy in progress keeps the mapping until it ends.
        """
        if self._lock is not None:
            _discard(self._lock, self._path)
            self._lock = None
        with suppress(BufferError):  # unmapped with its last view
            self._memory.close()


def sweep(alive: Collection[str] = (), folder: Path = SHM) -> list[str]:
    """Remove segments whose instance is not `alive` and whose process has ended.

    Returns their names. Both conditions must hold: a second stack on this host has instances that
    are unknown to this one.
    """
    removed = []
    for path in folder.glob("motet-*"):
        owner = owner_of(path.name)
        if owner is not None and owner not in alive and _remove_abandoned(path):
            removed.append(path.name)
    return removed


def owner_of(name: str) -> str | None:
    """Return the instance id in a segment's name; None if it is not a blob segment."""
    match = _NAME.fullmatch(name)
    return match[1] if match is not None else None


def _begin(slots: int) -> int:
    return -(-(_TABLE + slots * _ENTRY.size) // _PAGE) * _PAGE


def _new_file(path: Path | None) -> int:
    """Return the descriptor of a new empty file, locked for the lifetime of the process."""
    if path is None:
        return os.memfd_create("motet-blobs", os.MFD_CLOEXEC)
    while True:
        try:
            fd = os.open(
                path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise BlobError(f"cannot make the segment {path}: {error.strerror}") from None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # swept between creation and locking


def _discard(fd: int, path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
    os.close(fd)


def _remove_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _room(folder: Path) -> int:
    """Return the bytes that are free in a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _reason(error: OSError, folder: Path | None) -> str:
    """Return why memory could not be taken, with the remedy."""
    if error.errno != errno.ENOSPC or folder is None:
        return str(error.strerror)
    return (
        f"{folder} has {_room(folder)} free; lower the blob capacity or enlarge it (containers: "
        "shm_size)"
    )
