"""Test what is given back to the operating system, and that nothing written is lost."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref

import psutil
import pytest

from motet_shared.process import freed_memory
from motet_shared.process.freed_memory import (
    FreedMemory,
    only_read,
    resident_bytes,
    unmap_libraries,
)


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


class Process:
    """Stand in for what a process has: `sizes` are its resident bytes, look by look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.busy, self.size, self.returned = False, 100 << 20, 0
        monkeypatch.setattr(freed_memory, "return_freed", self._return)
        self._freed = FreedMemory(lambda: self.busy, lambda: self.size)

    def _return(self) -> None:
        self.returned += 1
        self.size = 100 << 20

    async def run(self, seconds: float) -> int:
        """Let time pass; return how often memory was given back."""
        before = self.returned
        for _ in range(int(seconds)):
            await self._freed.check(1.0)
            if (task := self._freed._returning) is not None:
                await task
        return self.returned - before


async def test_freed_memory_is_given_back_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch)
    assert await process.run(120) == 0, "nothing has grown"
    process.size += 8 << 20
    assert await process.run(60) == 1
    process.size += 8 << 20
    process.busy = True
    assert await process.run(300) == 0
    process.busy = False
    assert await process.run(1) == 1
    process.size += 8 << 20
    process.busy = True
    assert await process.run(601) == 1, "rarely, beside work that does not end"


async def test_cycles_are_collected_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        itself: Node

    process, gone = Process(monkeypatch), list[str]()
    node = Node()
    node.itself = node
    weakref.finalize(node, gone.append, "node")
    gc.disable()
    try:
        del node
        process.size += 8 << 20
        await process.run(60)
    finally:
        gc.enable()
    assert gone == ["node"]


def test_resident_bytes_are_those_of_the_kernel() -> None:
    assert resident_bytes() == pytest.approx(resident(), rel=0.05)


def test_heaps_of_changing_blocks_are_given_back() -> None:
    """Small blocks that live keep large ones that do not in memory."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [(libc.malloc(100_000), libc.malloc(5_000)) for _ in range(1000)]
    for large, _ in blocks:
        ctypes.memset(large, 1, 100_000)
    full = resident()
    for large, _ in blocks:
        libc.free(large)
    before = resident()
    freed_memory.return_freed()
    after = resident()
    for _, small in blocks:
        libc.free(small)
    assert before > full - (20 << 20), "glibc keeps them"
    assert after < before - (60 << 20)
