"""Give memory that a process no longer needs back to the operating system."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .madvise import DONT_NEED, advise

_UNIT = 1024  # bytes: the unit of /proc/PID/smaps


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
