"""Describe this machine's CPU for `motet plan --cpu`: measured bandwidth, computed FLOP/s."""

from __future__ import annotations

import ctypes
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from motet_models.free_memory import available_memory
from motet_models.roofline import Processor

BUFFER_BYTES = 256 << 20  # larger than any cache
SECONDS = 0.5  # of the measurement

# float32 operations per core and cycle: two FMA units of 16 or 8 lanes, two operations each.
_FLOPS_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("", 8))
# Multiples of that: VNNI adds four int8 products per lane, BF16 instructions two, AMX tiles 16
# (32 for int8).
_INT8 = (("amx_int8", 32), ("avx512_vnni", 4), ("avx_vnni", 4), ("", 1))
_BF16 = (("amx_bf16", 16), ("avx512_bf16", 2), ("", 1))


def this_cpu(*, threads: int = 0, bandwidth: float = 0.0, flops: float = 0.0) -> Processor:
    """Return this machine's processor; takes about a second if it measures the bandwidth.

    threads: threads that compute; 0: all.
    bandwidth: bytes/s; 0: measured.
    flops: float32 operations per second; 0: computed from clock and vector width.
    """
    threads = threads or len(os.sched_getaffinity(0))
    info = Path("/proc/cpuinfo").read_text()
    flags = set(_field(info, "flags").split())
    peak = flops or threads * _clock(info) * _first(_FLOPS_PER_CYCLE, flags)
    return Processor(
        name=f"{_field(info, 'model name') or 'this CPU'}, {threads} threads",
        memory=available_memory(),
        bandwidth=bandwidth or read_bandwidth(threads),
        bf16=peak * _first(_BF16, flags),
        int8=peak * _first(_INT8, flags),
    )


def read_bandwidth(threads: int, nbytes: int = BUFFER_BYTES, seconds: float = SECONDS) -> float:
    """Measure the bytes per second that `threads` threads read together.

    Returns the best of several passes of the C library's memchr, during which ctypes releases the
    interpreter lock.
    """
    buffer = ctypes.create_string_buffer(nbytes)  # zeros are written, so every page is present
    memchr = ctypes.CDLL(None).memchr
    memchr.restype, memchr.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t),
    )
    address, share = ctypes.addressof(buffer), nbytes // threads
    best, deadline = 0.0, time.monotonic() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while True:
            began = time.perf_counter()
            list(pool.map(lambda i: memchr(address + i * share, 1, share), range(threads)))
            best = max(best, threads * share / (time.perf_counter() - began))
            if time.monotonic() > deadline:
                return best


def _field(info: str, name: str) -> str:
    match = re.search(rf"^{name}\s*: (.*)$", info, re.MULTILINE)
    return match[1] if match else ""


def _clock(info: str) -> float:
    return float(_field(info, "cpu MHz") or 2000) * 1e6


def _first(table: tuple[tuple[str, int], ...], flags: set[str]) -> int:
    return next(value for flag, value in table if not flag or flag in flags)
