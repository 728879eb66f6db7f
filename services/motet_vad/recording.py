"""A whole recording at once: cut into stretches that are heard side by side, hundreds of times faster than it lasts.

A stretch that does not follow the one before it in memory hears the end of that one first, so that the network knows
the voice and the noise; what it says of that is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np

from motet_shared.sound_file import Samples, read_blocks

from .batcher import Batcher
from .model import FRAME, Floats, Memory

ROWS = 16  # stretches in a pass: few enough to leave room for live sessions
STRETCH = 480 * FRAME  # samples: 15 s
SHORTEST = 150  # frames that are worth a stretch of their own
BEFORE = 40  # frames: 1.3 s


async def probabilities(batcher: Batcher, data: bytes | memoryview, longest: float) -> AsyncIterator[list[float]]:
    """Of speech, one per frame, block by block. BadRequest for what is no sound, or longer than `longest` seconds."""
    blocks = read_blocks(data, longest, ROWS * STRETCH)
    memory = Memory()
    while (block := await asyncio.to_thread(_next, blocks)) is not None:
        yield await _of_block(batcher, _frames(block), memory)


def _next(blocks: Iterator[Samples]) -> Samples | None:
    return next(blocks, None)


def _frames(block: Samples) -> list[Floats]:
    """(FRAME,) each; the last one is filled up with silence."""
    return list(np.pad(block, (0, -len(block) % FRAME)).reshape(-1, FRAME))


async def _of_block(batcher: Batcher, frames: list[Floats], memory: Memory) -> list[float]:
    """`memory`: of what comes before the block; afterwards, of the block."""
    rows = max(1, min(ROWS, len(frames) // SHORTEST))
    starts = [len(frames) * row // rows for row in range(rows)]
    memories = [memory, *(Memory() for _ in starts[1:])]
    parts = [
        frames[start - (BEFORE if start else 0) : end]
        for start, end in zip(starts, [*starts[1:], len(frames)], strict=True)
    ]
    found = await asyncio.gather(*map(batcher.probabilities, memories, parts))
    memory.state, memory.tail = memories[-1].state, memories[-1].tail
    return [one for row, part in enumerate(found) for one in part[BEFORE if row else 0 :]]
