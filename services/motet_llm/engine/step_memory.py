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


class StepStorage:
    """Hold the memory of all replayed steps of a runner, which run one at a time.

    These are layouts, for `num_groups` groups of layers, sequences of up to `max_blocks` blocks and
    steps of up to `max_tokens` tokens, and the intermediates of the layers. Successive layers use
    two workspaces in turn, so that a layer's input, the result of the one before, stays until it
    has been read.
    """

    def __init__(self, num_groups: int, max_blocks: int, max_tokens: int):
        rows, groups = max(MAX_ROWS, 1), range(num_groups)
        tokens = max(rows, MAX_TOKENS, max_tokens)
        self.max_blocks = max_blocks
        self.slots = [torch.zeros(tokens, dtype=torch.int64) for _ in groups]
        self.lengths = [torch.zeros(rows, dtype=torch.int32) for _ in groups]
        self.tables = [torch.zeros(rows, max_blocks, dtype=torch.int32) for _ in groups]
        self._workspaces = Workspace(), Workspace()

    def workspace(self, index: int) -> Workspace:
        """Return the workspace of layer `index`."""
        return self._workspaces[index % 2]

    def input_like(self, index: int, x: Tensor) -> Tensor:
        """Return memory for the input of layer `index`, if the layer before did not compute it."""
        return self.workspace(index + 1).rewind().place(x)


class StepMemory:
    """Hold the layout of steps with `counts` tokens per row, in the memory of all steps."""

    def __init__(self, counts: Sequence[int], storage: StepStorage):
        self._storage = storage
        self.slots = [slots[: sum(counts)] for slots in storage.slots]
        starts = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
        rows = len(counts)
        for lengths in storage.lengths:  # `write` has the true ones
            lengths[:rows].copy_(torch.tensor(counts))
        self.batches = [
            PagedBatch(tables[:rows], starts, lengths[:rows])
            for tables, lengths in zip(storage.tables, storage.lengths, strict=True)
        ]
        self._segments: Segments | None = None
        self._tapes: dict[int, _LayerTape] = {}
        self._last: tuple[int, Tensor] | None = None  # the previous layer and its output
        self._turns: Turns | None = None
        self._given: Turns | None = None

    @property
    def max_blocks(self) -> int:
        return self._storage.max_blocks

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
            if not self._is_result_before(index, x):
                x = self._storage.input_like(index, x).copy_(x.clone())
            workspace = self._storage.workspace(index)
            tape = self._tapes[index] = _LayerTape(layer, x, self._turns, workspace)
            result = tape.result
        else:
            result = tape.again(x)
        self._last = index, result
        return result

    def _is_result_before(self, index: int, x: Tensor) -> bool:
        """Return True if x is the last result, and not in the workspace of layer `index`."""
        if self._last is None:
            return False
        before, result = self._last
        return (index - before) % 2 == 1 and x.data_ptr() == result.data_ptr()

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
