"""A step's layout at addresses that stay, so that the layers of a decode step can be replayed.

Made for rows of so many tokens each; every such step writes its block tables, slots and lengths into the same tensors.
What a layer has recorded over them (`motet_kernels.replay`) holds as long as they do.

Shapes: B rows, N tokens, M blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from motet_kernels.attention import PagedBatch
from motet_kernels.lora import Segments
from motet_kernels.replay import Tape

from .recent_rows import Rows

MAX_ROWS = 4  # a step of more rows is busy with its matrices, and a tape keeps what the step makes on its way
MAX_TOKENS = 8  # of a row alone, for the same reasons

Turns = tuple[Tensor, Tensor]
Layer = Callable[[Tensor, Turns], Tensor]


class StepMemory:
    """Of rows of `counts` tokens for `num_groups` groups of layers, whose sequences have up to `max_blocks` blocks."""

    def __init__(self, counts: Sequence[int], num_groups: int, max_blocks: int):
        self.max_blocks = max_blocks
        self.slots = [torch.zeros(sum(counts), dtype=torch.int64) for _ in range(num_groups)]
        starts = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
        tables = [torch.zeros(len(counts), max_blocks, dtype=torch.int32) for _ in range(num_groups)]
        self.batches = [PagedBatch(table, starts, torch.tensor(counts, dtype=torch.int32)) for table in tables]
        self._segments: Segments | None = None
        self._tapes: dict[int, _LayerTape] = {}
        self._last: Tensor | None = None  # what the layer before gave, in memory of its own
        self._turns: Turns | None = None
        self._given: Turns | None = None

    def keep_segments(self, segments: Segments) -> Segments:
        """Which rows have which adapters in the next step, at addresses that stay."""
        if self._segments is None:
            self._segments = segments
        else:
            self._segments.write(segments)
        return self._segments

    def write(self, rows: Sequence[Rows], slots: Sequence[Tensor]) -> None:
        """The next step: by group its rows, of tables `[B, ≤M]`, and the slots `[N]` of its tokens."""
        for batch, row, into, slot in zip(self.batches, rows, self.slots, slots, strict=True):
            batch.tables_BM[:, : row.tables_BM.shape[1]] = row.tables_BM
            batch.lengths_B.copy_(row.lengths_B)
            into.copy_(slot)
        self._last = self._given = None

    def run(self, index: int, layer: Layer, x: Tensor, turns: Turns) -> Tensor:
        """`layer(x, turns)`, recorded when it is met for the first time. The next step overwrites the result."""
        if self._given is not turns:
            self._given, self._turns = turns, self._keep(turns)
        assert self._turns is not None
        tape = self._tapes.get(index)
        if tape is None:
            tape = self._tapes[index] = _LayerTape(layer, x if x is self._last else x.clone(), self._turns)
            self._last = tape.result
        else:
            self._last = tape.again(x)
        return self._last

    def _keep(self, turns: Turns) -> Turns:
        """Cosines and sines at addresses that stay."""
        if self._turns is None:
            return turns[0].clone(), turns[1].clone()
        for ours, theirs in zip(self._turns, turns, strict=True):
            ours.copy_(theirs)
        return self._turns


def stays(counts: Sequence[int]) -> bool:
    """Whether a step of rows of so many tokens is worth a memory: few that decode, or one alone with a draft."""
    return len(counts) <= MAX_ROWS and max(counts) <= (MAX_TOKENS if len(counts) == 1 else 1)


class _LayerTape:
    """One layer's calls, and where its input lies."""

    def __init__(self, layer: Layer, x: Tensor, turns: Turns):
        self._x = x
        self._tape = Tape(lambda: layer(x, turns))
        self.result = self._tape.result

    def again(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self._x.data_ptr():
            self._x.copy_(x)
        return self._tape.replay()
