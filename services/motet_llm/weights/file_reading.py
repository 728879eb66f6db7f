"""Read a large file into memory as fast as its disk delivers, on threads that yield to others.

What the page cache holds is copied from there; all else is read past it. A second copy in the page
cache costs more than the disk on virtual machines whose free memory returns to the host: each page
is fetched from there again.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock, Thread, get_native_id
from typing import Any

from torch import Tensor

from motet_shared.process.memory_turn import MemoryTurn, TurnAbandoned

PAGE = 4096  # bytes; offsets, sizes and addresses of direct reads are multiples of it
CHUNK = 8 << 20  # bytes of one read
THREADS = 2  # while one waits for pages of memory, the other keeps the disk at work
_PROBES = 8  # places at which the page cache is examined
_NICE = 10  # streams of other models go first


class FileReading:
    """Read a file into `memory` from the constructor on; `wait` returns when all of it is there.

    descriptor: an open file, which is closed at the end of the reading. start: offset in bytes.
    memory: uint8 `[bytes]`. turn: waited for before; None: nothing is.
    """

    def __init__(self, descriptor: int, start: int, memory: Tensor, turn: MemoryTurn | None = None):
        self._descriptor, self._start, self._turn = descriptor, start, turn
        data: Any = memory.numpy()
        self._memory = memoryview(data)
        self._lock = Lock()
        self._offsets = iter(range(0, len(memory), CHUNK))
        self._problem: OSError | TurnAbandoned | None = None
        self._direct = False
        aligned = not (start % PAGE or len(memory) % PAGE or memory.data_ptr() % PAGE)
        if aligned and not self._is_cached():
            self._read_past_cache(True)
        self._threads = [
            Thread(target=self._run, name="motet-read", daemon=True) for _ in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait for the end.

        Raises OSError if the file cannot be read or is too short, and TurnAbandoned.
        """
        for thread in self._threads:
            thread.join()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), _NICE)
        try:
            if self._turn is not None:
                self._turn.wait()
            for offset in self._chunks():
                self._read(offset)
        except (OSError, TurnAbandoned) as error:
            self._problem = error

    def _chunks(self) -> Iterator[int]:
        """Yield the chunks that no thread has taken yet, until one has failed."""
        while self._problem is None:
            with self._lock:
                offset = next(self._offsets, None)
            if offset is None:
                return
            yield offset

    def _read(self, offset: int) -> None:
        end = min(offset + CHUNK, len(self._memory))
        while offset < end:
            target, direct = [self._memory[offset:end]], self._direct
            try:
                count = os.preadv(self._descriptor, target, self._start + offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._read_past_cache(False)  # the file system has other rules
                continue
            if not count:
                raise OSError(f"the file ends {len(self._memory) - offset} bytes too early")
            offset += count

    def _is_cached(self) -> bool:
        """Return True if the page cache holds samples of the file."""
        step = max(len(self._memory) // _PROBES // PAGE * PAGE, PAGE)
        target = [bytearray(1)]
        try:
            for offset in range(0, len(self._memory), step):
                os.preadv(self._descriptor, target, self._start + offset, os.RWF_NOWAIT)
        except OSError:  # BlockingIOError, or a file system that cannot tell
            return False
        return True

    def _read_past_cache(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        except OSError:  # a file system without direct reads
            return
        self._direct = direct
