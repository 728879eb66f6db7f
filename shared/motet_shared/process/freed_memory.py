"""Give memory that a process no longer needs back to the operating system."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from .madvise import DONT_NEED, advise

_UNIT = 1024  # bytes: the unit of /proc/PID/smaps
_GROWTH = 4 << 20  # bytes of resident memory that are worth the call
_IDLE_EVERY, _BUSY_EVERY = 30.0, 600.0  # seconds


class Mapping(msgspec.Struct):
    """Describe a mapping of this process; sizes in bytes.

    resident: pages in memory. written: pages that are this process's own, in memory or swapped out.
    """

    start: int
    size: int
    permissions: str
    file: str
    resident: int = 0
    written: int = 0


def return_freed() -> None:
    """Give freed memory of the allocator back to the operating system.

    glibc keeps free memory between live allocations: after a model was loaded and warmed up, that
    is much.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the kernel has no /proc/self/statm."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class FreedMemory:
    """Give freed memory back while a process runs: between its work, and rarely beside it.

    glibc's heaps grow by fragmentation for hours, while blocks of changing sizes come and go. A low threshold of
    mmap (`M_MMAP_THRESHOLD`) prevents that, but the kernel then fills each large block with zeros again and again:
    layers took up to 2.7 times as long.

    is_busy: returns True while the process serves anything.
    """

    def __init__(self, is_busy: Callable[[], bool], resident: Callable[[], int] = resident_bytes):
        self._is_busy = is_busy
        self._resident = resident
        self._since, self._least = 0.0, self._resident()
        self._returning: asyncio.Task[None] | None = None

    async def check(self, elapsed: float) -> None:
        """Look whether it is time, `elapsed` seconds after the last call; a duty of `Bus.monitor`."""
        self._since += elapsed
        if self._since < (_BUSY_EVERY if self._is_busy() else _IDLE_EVERY):
            return
        self._since = 0.0
        self._least = min(self._least, resident := self._resident())
        if resident >= self._least + _GROWTH:
            # Not waited for: other duties are due, and threads may be few.
            self._returning = asyncio.create_task(self._return())

    async def _return(self) -> None:
        if not self._is_busy():
            gc.collect()  # cycles, such as an error's, that hold tensors; it is done rarely otherwise
        await asyncio.to_thread(return_freed)
        self._least = self._resident()


def unmap_libraries() -> int:
    """Unmap the pages of shared libraries that were only read; return their bytes.

    A start reads most of each library (symbols, initializers), and little of it is needed again.
    Pages that are needed again are mapped from the kernel's page cache when they are read. Returns
    0 where the kernel has no /proc/self/smaps.
    """
    try:
        smaps = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    return sum(
        mapping.resident
        for mapping in only_read(smaps)
        if advise(mapping.start, mapping.size, DONT_NEED)
    )


def only_read(smaps: str) -> list[Mapping]:
    """Return the mappings of shared libraries that have no pages of the process's own.

    smaps: /proc/PID/smaps. Left out is what the process wrote, such as relocations, which would be
    lost with its pages, and what is no library, such as weights.
    """
    return [
        mapping
        for mapping in _mappings(smaps)
        if ".so" in Path(mapping.file).suffixes
        and "w" not in mapping.permissions
        and mapping.written == 0
        and mapping.resident > 0
    ]


def _mappings(smaps: str) -> Iterator[Mapping]:
    """Yield the mappings of a /proc/PID/smaps."""
    mapping: Mapping | None = None
    for line in smaps.splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            if mapping is not None:
                yield mapping
            start, end = (int(address, 16) for address in name.split("-"))
            permissions, _, _, _, *file = rest.split(maxsplit=4)
            mapping = Mapping(start, end - start, permissions, "".join(file))
        elif mapping is not None and name == "Rss:":
            mapping.resident = int(rest.split()[0]) * _UNIT
        elif mapping is not None and name in ("Anonymous:", "Swap:"):
            mapping.written += int(rest.split()[0]) * _UNIT
    if mapping is not None:
        yield mapping
