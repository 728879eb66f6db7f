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
from motet_kernels.runtime.replay import Tape, Workspace
from motet_llm.attention.sink_window import Rows

MAX_ROWS = 64  # decode rows of a step that is replayed; larger ones are bound by matrices
MAX_TOKENS = 8  # of a single row with a draft: each length has recordings of its own

Turns = tuple[Tensor, Tensor]
Layer = Callable[[Tensor, Turns], Tensor]


class LayerWorkspaces:
    """Hold the intermediates of all recorded layers.

    Successive layers use two workspaces in turn, so that a layer's input, the result of the one
    before, stays until it has been read.
    """

    def __init__(self) -> None:
        self._workspaces = Workspace(), Workspace()

    def of_layer(self, index: int) -> Workspace:
        return self._workspaces[index % 2]

    def input_like(self, index: int, x: Tensor) -> Tensor:
        """Return memory for the input of layer `index`, if no recorded layer computes it."""
        return self.of_layer(index + 1).rewind().place(x)


class StepMemory:
    """Hold the layout of steps with `counts` tokens per row, for `num_groups` groups of layers.

    Sequences may have up to `max_blocks` blocks. workspaces: of all steps, which run one at a time.
    """

    def __init__(
        self,
        counts: Sequence[int],
        num_groups: int,
        max_blocks: int,
        workspaces: LayerWorkspaces,
    ):
        self.max_blocks = max_blocks
        self._workspaces = workspaces
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

        The layer after the next one overwrites the result, or the next step.
        """
        if self._given is not turns:
            self._given, self._turns = turns, self._keep(turns)
        assert self._turns is not None
        tape = self._tapes.get(index)
        if tape is None:
            if self._last is None or x.data_ptr() != self._last.data_ptr():
                x = self._workspaces.input_like(index, x).copy_(x)
            workspace = self._workspaces.of_layer(index)
            tape = self._tapes[index] = _LayerTape(layer, x, self._turns, workspace)
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

    def __init__(self, layer: Layer, x: Tensor, turns: Turns, workspace: Workspace):
        self._x = x
        self._tape = Tape(lambda: layer(x, turns), workspace)
        self.result = self._tape.result

    def again(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self._x.data_ptr():
            self._x.copy_(x)
        return self._tape.replay()
