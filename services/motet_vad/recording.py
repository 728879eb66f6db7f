"""Process a whole recording in stretches computed in parallel, hundreds of times real time.

A stretch without the state of the previous one first reads the end of that one, so that the network
adapts to voice and noise; the probabilities of that part are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress

import numpy as np

from motet_media.pool import decoding
from motet_media.sound_file import Samples, read_blocks

from .batcher import Batcher
from .model import FRAME, Floats, StreamState

MAX_STRETCHES = 16  # per pass: few enough to leave room for live sessions
STRETCH_SAMPLES = 480 * FRAME  # samples: 15 s
MIN_FRAMES = 150  # of a stretch
WARM_UP_FRAMES = 40  # read before a stretch: 1.3 s


async def probabilities(
    batcher: Batcher, data: bytes | memoryview, longest: float
) -> AsyncGenerator[list[float], None]:
    """Yield speech probabilities, one per frame, block by block.

    Raises BadRequest for data that is no audio or longer than `longest` seconds.
    """
    blocks = read_blocks(data, longest, MAX_STRETCHES * STRETCH_SAMPLES)
    stream_state = StreamState()
    try:
        while (block := await decoding(_next, blocks)) is not None:
            yield await _of_block(batcher, _frames(block), stream_state)
    finally:
        # the generator still runs on a thread; its child process is killed already
        with suppress(ValueError):
            blocks.close()


def _next(blocks: Generator[Samples, None, None]) -> Samples | None:
    return next(blocks, None)


def _frames(block: Samples) -> list[Floats]:
    """Split a block into frames, (FRAME,) each; the last one is padded with silence."""
    return list(np.pad(block, (0, -len(block) % FRAME)).reshape(-1, FRAME))


async def _of_block(
    batcher: Batcher, frames: list[Floats], stream_state: StreamState
) -> list[float]:
    """Return the probabilities of a block; `stream_state` is the state before it, then after it."""
    rows = max(1, min(MAX_STRETCHES, len(frames) // MIN_FRAMES))
    starts = [len(frames) * row // rows for row in range(rows)]
    stream_states = [stream_state, *(StreamState() for _ in starts[1:])]
    parts = [
        frames[start - (WARM_UP_FRAMES if start else 0) : end]
        for start, end in zip(starts, [*starts[1:], len(frames)], strict=True)
    ]
    found = await asyncio.gather(*map(batcher.probabilities, stream_states, parts))
    stream_state.state, stream_state.tail = stream_states[-1].state, stream_states[-1].tail
    return [one for row, part in enumerate(found) for one in part[WARM_UP_FRAMES if row else 0 :]]
