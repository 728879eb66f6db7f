"""Store the left context of streaming GPU convolutions, double-buffered per stream.

Each stream has two rows, one to read and one to write, so that a launch that stores its inputs
needs no other launch before or after it, and streams of any age share a launch.

Shapes: S rows, X numbers that all convolutions together keep of a stream, B streams of a call.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from motet_kernels.audio.packed_conv import Context, PackedConv
from motet_kernels.spans import upload

_INITIAL_STREAMS = 8  # initial capacity
_ALIGNMENT = 8  # numbers: each convolution's part begins at a multiple of 16 bytes


@dataclass(eq=False, slots=True, weakref_slot=True)
class StreamContext:
    """Hold the place of a stream's convolution context.

    Its two rows are freed when it is garbage-collected.
    turn: which of the two rows holds the latest context.
    """

    pair: int
    turn: int = 0
    has_context: bool = False


class ContextBuffers:
    """Hold the left context of `convs`, in their order; those with a reach of 0 have none."""

    def __init__(self, convs: Sequence[PackedConv]):
        taps = convs[0].taps
        self._shapes = [(conv.reach, conv.channels) for conv in convs]
        sizes = [
            -(-reach * channels // _ALIGNMENT) * _ALIGNMENT for reach, channels in self._shapes
        ]
        *self._begins, total = accumulate(sizes, initial=0)
        self._kept_SX = taps.new_zeros(2 * _INITIAL_STREAMS, total)
        self._free = list(reversed(range(_INITIAL_STREAMS)))

    @property
    def free(self) -> int:
        """Return how many more streams fit without growing."""
        return len(self._free)

    def begin(self) -> StreamContext:
        """Return a stream without any context yet."""
        if not self._free:
            self._grow()
        stream = StreamContext(self._free.pop())
        weakref.finalize(stream, self._free.append, stream.pair).atexit = False
        return stream

    @torch.inference_mode()
    def _grow(self) -> None:
        old_SX, (rows, width) = self._kept_SX, self._kept_SX.shape
        self._kept_SX = old_SX.new_zeros(2 * rows, width)
        self._kept_SX[:rows] = old_SX
        self._free += reversed(range(rows // 2, rows))

    def next_contexts(self, streams: Sequence[StreamContext]) -> list[Context | None]:
        """Return each convolution's context for the next chunk of `streams`.

        The streams are as before until `commit`, so a chunk that fails can be decoded again.
        """
        before = [2 * stream.pair + stream.turn if stream.has_context else -1 for stream in streams]
        after = [2 * stream.pair + 1 - stream.turn for stream in streams]
        rows_2B = upload(torch.tensor([before, after], dtype=torch.int32), self._kept_SX.device)
        return [self._context(index, rows_2B) for index in range(len(self._shapes))]

    @staticmethod
    def commit(streams: Sequence[StreamContext]) -> None:
        """Have the streams continue after the chunk that was decoded with `next_contexts`."""
        for stream in streams:
            stream.turn, stream.has_context = 1 - stream.turn, True

    def _context(self, index: int, rows_2B: Tensor) -> Context | None:
        (reach, channels), begin = self._shapes[index], self._begins[index]
        if not reach:
            return None
        kept_SX = self._kept_SX[:, begin : begin + reach * channels]
        return Context(kept_SX.unflatten(1, (reach, channels)), rows_2B)
