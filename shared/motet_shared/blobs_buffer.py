"""Plain memory for blobs: copying, fresh destinations, digests, and what a caller's buffer must be."""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from motet_shared.errors import BlobError

_LARGE = 1 << 18  # bytes; up to here a copy holds the interpreter lock, for some 50 µs
_HUGE = 4 << 20  # bytes; from here on a destination is worth huge pages
_ITEM_SIZE = {
    **dict.fromkeys(("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones in one go, outside the interpreter lock.

    In pieces, with the lock let go in between, the C library takes each for a small copy and reads the target first:
    32 MB took twice as long.
    """
    if len(source) <= _LARGE:
        target[:] = source
        return
    import numpy as np  # not for the processes that only pass small blobs on

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def fresh(nbytes: int) -> memoryview:
    """Writable memory for `nbytes` bytes. Huge pages make filling large fresh memory 2 to 6 times faster."""
    if nbytes < _HUGE:
        return memoryview(bytearray(nbytes))
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def digest_of(data: memoryview) -> str:
    """BLAKE2b-128, hex. Runs outside the interpreter lock, at 0.5 to 1 GB/s."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def flat(data: Any) -> memoryview:
    """The bytes of anything with a C-contiguous buffer. Raises BlobError."""
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(bytearray())
    except TypeError as error:
        raise BlobError(f"blob data must be one C-contiguous buffer: {error}") from None


def target(into: Any, nbytes: int) -> memoryview:
    """The first `nbytes` bytes of a writable buffer. Raises BlobError."""
    view = flat(into)
    if view.readonly or len(view) < nbytes:
        raise BlobError(f"into: {len(view)} bytes (read-only: {view.readonly}); the blob needs {nbytes} writable bytes")
    return view[:nbytes]


def check_shape(dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Raise BlobError if `nbytes` is not what `dtype` and `shape` take. No shape, or a dtype of others: no opinion."""
    size = _ITEM_SIZE.get(dtype)
    if size is not None and shape and (min(shape) < 0 or math.prod(shape) * size != nbytes):
        raise BlobError(f"a blob of {dtype} and shape {tuple(shape)} has {math.prod(shape) * size} bytes, not {nbytes}")
