"""Keep a step's layout at fixed addresses, so that the layers of a decode step can be replayed.

One memory serves the steps whose rows have the same token counts; each such step writes its block
tables, slots and lengths into the same tensors. Recordings of layers over them
(`motet_kernels.runtime.replay`) stay valid as long as those tensors do.

Shapes: B rows, N tokens, M blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.linear.segments import Segments
from motet_kernels.runtime.replay import Tape
from motet_llm.attention.sink_window import Rows

MAX_ROWS = 4  # larger steps are bound by matrices, and a tape keeps its intermediates
MAX_TOKENS = 8  # of a single row, for the same reasons

Turns = tuple[Tensor, Tensor]
Layer = Callable[[Tensor, Turns], Tensor]


class StepMemory:
    """Hold the layout of steps with `counts` tokens per row, for `num_groups` groups of layers.

    Sequences may have up to `max_blocks` blocks.
    """

    def __init__(self, counts: Sequence[int], num_groups: int, max_blocks: int):
        self.max_blocks = max_blocks
        self.slots = [torch.zeros(sum(counts), dtype=torch.int64) for _ in range(num_groups)]
        starts = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
        tables = [
            torch.zeros(len(counts), max_blocks, dtype=torch.int32) for _ in range(num_groups)
        ]
        self.batches = [
            PagedBatch(table, starts, torch.tensor(counts, dtype=torch.int32)) for table in tables
        ]
        self._segments: Segments | None = None
        self._tapes: dict[int, _LayerTape] = {}
        self._last: Tensor | None = None  # the previous layer's output, in its own memory
        self._turns: Turns | None = None
        self._given: Turns | None = None

    def keep_segments(self, segments: Segments) -> Segments:
        """Return the next step's adapter segments, copied to fixed addresses."""
        if self._segments is None:
            self._segments = segments
        else:
            self._segments.write(segments)
        return self._segments

    def write(self, rows: Sequence[Rows], slots: Sequence[Tensor]) -> None:
        """Write the next step: by group its rows (tables `[B, ≤M]`) and its tokens' slots `[N]`."""
        for batch, row, into, slot in zip(self.batches, rows, self.slots, slots, strict=True):
            batch.tables_BM[:, : row.tables_BM.shape[1]] = row.tables_BM
            batch.lengths_B.copy_(row.lengths_B)
            into.copy_(slot)
        self._last = self._given = None

    def run(self, index: int, layer: Layer, x: Tensor, turns: Turns) -> Tensor:
        """Return `layer(x, turns)`, recorded on its first call and replayed afterwards.

        The next step overwrites the result.
        """
        if self._given is not turns:
            self._given, self._turns = turns, self._keep(turns)
        assert self._turns is not None
        tape = self._tapes.get(index)
        if tape is None:
            tape = self._tapes[index] = _LayerTape(
                layer, x if x is self._last else x.clone(), self._turns
            )
            self._last = tape.result
        else:
            self._last = tape.again(x)
        return self._last

    def _keep(self, turns: Turns) -> Turns:
        """Copy cosines and sines to fixed addresses."""
        if self._turns is None:
            return turns[0].clone(), turns[1].clone()
        for fixed, turn in zip(self._turns, turns, strict=True):
            fixed.copy_(turn)
        return self._turns


def stays(counts: Sequence[int]) -> bool:
    """Return True if a step with these token counts is worth recording.

    That is a step of few decode rows, or one row with a draft.
    """
    return len(counts) <= MAX_ROWS and max(counts) <= (MAX_TOKENS if len(counts) == 1 else 1)


class _LayerTape:
    """Record one layer's kernel calls, and replay them on a new input."""

    def __init__(self, layer: Layer, x: Tensor, turns: Turns):
        self._x = x
        self._tape = Tape(lambda: layer(x, turns))
        self.result = self._tape.result

    def again(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self._x.data_ptr():
            self._x.copy_(x)
        return self._tape.replay()
