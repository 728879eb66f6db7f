"""Test what is given back to the operating system, and that nothing written is lost."""

from __future__ import annotations

import ctypes
import math

import psutil

from motet_shared.process.freed_memory import only_read, unmap_libraries


def resident() -> int:
    """Return the bytes that this process holds in memory."""
    return psutil.Process().memory_info().rss


def test_pages_that_were_only_read_are_unmapped_and_come_back() -> None:
    libm = ctypes.CDLL("libm.so.6")
    libm.cos.restype, libm.cos.argtypes = ctypes.c_double, [ctypes.c_double]
    expected = libm.cos(0.5)
    before = resident()
    unmapped = unmap_libraries()
    assert unmapped > 0
    assert resident() < before - unmapped / 2
    assert libm.cos(0.5) == expected == math.cos(0.5)


def mapping(
    start: int, permissions: str, file: str, *, rss: int = 64, anonymous: int = 0, swap: int = 0
) -> str:
    """Return a mapping of 64 kB as /proc/PID/smaps has it."""
    return (
        f"{start:x}-{start + 65536:x} {permissions} 00000000 08:01 77      {file}\n"
        f"Rss: {rss} kB\nAnonymous: {anonymous} kB\nSwap: {swap} kB\nVmFlags: rd mr mw me\n"
    )


def test_only_libraries_without_pages_of_the_process_are_chosen() -> None:
    smaps = (
        mapping(0x10000, "r-xp", "/lib/libm.so.6")
        + mapping(0x20000, "r--p", "/python/array.cpython-311-x86_64-linux-gnu.so")
        + mapping(0x30000, "rw-p", "/lib/libm.so.6")
        + mapping(0x40000, "r--p", "/lib/libm.so.6", anonymous=4)
        + mapping(0x50000, "r--p", "/lib/libm.so.6", swap=4)
        + mapping(0x60000, "r-xp", "/lib/libm.so.6", rss=0)
        + mapping(0x70000, "r--s", "/models/weights.safetensors")
        + mapping(0x80000, "r-xp", "")
        + mapping(0x90000, "r-xp", "[vdso]")
    )
    chosen = [(each.start, each.size, each.resident) for each in only_read(smaps)]
    assert chosen == [(0x10000, 65536, 65536), (0x20000, 65536, 65536)]
