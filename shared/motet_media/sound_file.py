"""Read sound files as one channel, at 16 kHz unless asked, or refuse them with the cause.

Files are decoded in child processes. For services whose extra includes `av` and numpy. All
functions block: run them in `motet_media.pool.decoding`.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from motet_shared.errors import BadRequest

from .pool import pool
from .worker import Data, JobLimits

RATE = 16_000
Samples = NDArray[np.float32]
_MEMORY = 512 << 20  # bytes for demuxers and decoders


def claimed_seconds(data: Data) -> float:
    """Return the duration that a file claims; 0.0 if absent or unreadable. Decodes nothing."""
    limits = JobLimits(cpu=2.0, wall=10.0, memory=_MEMORY + 3 * len(data))
    try:
        ((meta, _),) = pool("sound").run("claimed", data, limits, _refused)
    except BadRequest:
        return 0.0
    return float(meta["seconds"])


def read_audio(data: Data, longest: float, rate: int = RATE) -> Samples:
    """Return all samples in float32 at `rate` Hz; full scale is [-1, 1].

    A truncated file gives its intact part. Raises BadRequest (param "file") for a file that is
    empty, has no sound or no sample, is longer than `longest` seconds, or costs more than its
    limits; excess length is detected without decoding more.
    """
    return np.concatenate(list(read_parts(data, longest, rate)))


def read_blocks(data: Data, longest: float, size: int) -> Generator[Samples, None, None]:
    """Yield `size` samples at a time and the rest at the end, without holding the whole file."""
    held: list[Samples] = []
    count = 0
    for part in read_parts(data, longest):
        held.append(part)
        count += len(part)
        if count >= size:
            complete = np.concatenate(held)
            for start in range(0, count - count % size, size):
                yield complete[start : start + size]
            held, count = [complete[count - count % size :]], count % size
    if count:
        yield np.concatenate(held)


def read_parts(data: Data, longest: float, rate: int = RATE) -> Generator[Samples, None, None]:
    """Yield samples, about 30 s at a time; at least one sample, or BadRequest.

    The child waits for the consumer.
    """
    for _, payload in pool("sound").run(
        "samples", data, _limits(len(data), longest), _refused, longest=longest, rate=rate
    ):
        yield np.frombuffer(payload, np.float32)


def _limits(nbytes: int, longest: float) -> JobLimits:
    """Return limits for 50 times real time, and at least 20 kB of file per second of CPU time."""
    cpu = 5.0 + min(longest / 50, nbytes / 20_000)
    return JobLimits(cpu, 5.0 + 4 * cpu, _MEMORY + 3 * nbytes)


def _refused(reason: str) -> BadRequest:
    return BadRequest(f"the audio file cannot be transcribed: {reason}", param="file")
