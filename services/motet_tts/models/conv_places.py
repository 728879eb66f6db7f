"""Store the left context of streaming GPU convolutions, double-buffered per stream.

Each stream has two places, one to read and one to write, so that a launch that stores its inputs
needs no other launch before or after it, and streams of any age share a launch.

Shapes: S places, X numbers that all convolutions together keep of a stream, B streams of a call.
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

_STREAMS = 8  # initial capacity
_ALIGNED = 8  # numbers: each convolution's part begins at a multiple of 16 bytes


@dataclass(eq=False, slots=True, weakref_slot=True)
class Stream:
    """State of a sequence that is being decoded.

    Its two places are freed when it is garbage-collected.
    """

    pair: int
    turn: int = 0  # which of the two places holds the latest context
    begun: bool = False


class Places:
    """Hold the left context of `convs`, in their order; those with a reach of 0 have none."""

    def __init__(self, convs: Sequence[PackedConv]):
        taps = convs[0].taps
        self._shapes = [(conv.reach, conv.channels) for conv in convs]
        sizes = [-(-reach * channels // _ALIGNED) * _ALIGNED for reach, channels in self._shapes]
        *self._begins, total = accumulate(sizes, initial=0)
        self._kept_SX = taps.new_zeros(2 * _STREAMS, total)
        self._free = list(reversed(range(_STREAMS)))

    @property
    def free(self) -> int:
        """Return how many more streams fit without growing."""
        return len(self._free)

    def begin(self) -> Stream:
        """Return a stream without any context yet."""
        if not self._free:
            self._grow()
        stream = Stream(self._free.pop())
        weakref.finalize(stream, self._free.append, stream.pair).atexit = False
        return stream

    @torch.inference_mode()
    def _grow(self) -> None:
        have, (places, width) = self._kept_SX, self._kept_SX.shape
        self._kept_SX = have.new_zeros(2 * places, width)
        self._kept_SX[:places] = have
        self._free += reversed(range(places // 2, places))

    def go_on(self, streams: Sequence[Stream]) -> list[Context | None]:
        """Return each convolution's context for the next chunk of `streams`.

        The chunk must then be decoded, since the streams' places are switched here.
        """
        before = [2 * stream.pair + stream.turn if stream.begun else -1 for stream in streams]
        for stream in streams:
            stream.turn, stream.begun = 1 - stream.turn, True
        after = [2 * stream.pair + stream.turn for stream in streams]
        rows_2B = upload(torch.tensor([before, after], dtype=torch.int32), self._kept_SX.device)
        return [self._context(index, rows_2B) for index in range(len(self._shapes))]

    def _context(self, index: int, rows_2B: Tensor) -> Context | None:
        (reach, channels), begin = self._shapes[index], self._begins[index]
        if not reach:
            return None
        kept_SX = self._kept_SX[:, begin : begin + reach * channels]
        return Context(kept_SX.unflatten(1, (reach, channels)), rows_2B)
