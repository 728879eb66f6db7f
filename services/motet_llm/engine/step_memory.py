"""Keep a step's layout at fixed addresses, so that the layers of a step can be replayed.

One memory serves the decode steps whose rows have the same token counts, and one the other steps of
about as many tokens, whatever their rows. Each such step writes its block tables, slots and lengths
into the same tensors. Recordings of layers over them (`motet_kernels.runtime.replay`) stay valid as
long as those tensors do.

Shapes: B rows, N tokens, P tokens with padding, M blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from motet_kernels.attention.kv import NO_SLOT
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.linear.segments import Segments
from motet_kernels.runtime.replay import Tape, Workspace
from motet_llm.attention.sink_window import Rows

MAX_ROWS = 64  # rows of a step that is replayed; larger ones are bound by matrices
MAX_TOKENS = 8  # of a single row with a draft: each length has recordings of its own
SIZES_PER_OCTAVE = 8  # sizes to which other steps are padded, from one power of two to the next
LEAST_PADDED = 4  # tokens between such sizes, at least
MAX_EXACT = 16  # tokens up to which nothing is padded: kernels of few rows take longer by the row

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
        rows, groups = MAX_ROWS + 1, range(num_groups)  # the last is for padding
        tokens = padded(max(rows, MAX_TOKENS, max_tokens))
        self.max_blocks = max_blocks
        self.slots = [torch.zeros(tokens, dtype=torch.int64) for _ in groups]
        self.lengths = [torch.zeros(rows, dtype=torch.int32) for _ in groups]
        self.tables = [torch.zeros(rows, max_blocks, dtype=torch.int32) for _ in groups]
        self._workspaces = Workspace(), Workspace()
        self._turns: Turns | None = None

    def workspace(self, index: int) -> Workspace:
        """Return the workspace of layer `index`."""
        return self._workspaces[index % 2]

    def input_like(self, index: int, x: Tensor) -> Tensor:
        """Return memory for the input of layer `index`, if the layer before did not compute it."""
        return self.workspace(index + 1).rewind().place(x)

    def turns_of(self, size: int, turns: Turns) -> Turns:
        """Return memory for cosines and sines of `size` tokens, like these `[1, N, …]`."""
        if self._turns is None:
            tokens = len(self.slots[0])
            cos, sin = (turn.new_zeros(1, tokens, *turn.shape[2:]) for turn in turns)
            self._turns = cos, sin
        return self._turns[0][:, :size], self._turns[1][:, :size]


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
            self._write(batch, row, into, slot)
        self._last = self._given = None

    def _write(self, batch: PagedBatch, row: Rows, into: Tensor, slot: Tensor) -> None:
        """Write a group's rows to `batch`, and its slots to `into`."""
        batch.tables_BM[:, : row.tables_BM.shape[1]] = row.tables_BM
        batch.lengths_B.copy_(row.lengths_B)
        into.copy_(slot)

    def run(self, index: int, layer: Layer, x: Tensor, turns: Turns) -> Tensor:
        """Return `layer(x, turns)`, recorded on its first call and replayed afterwards.

        The layer after the next one overwrites the result, or the next step.
        """
        if self._given is not turns:
            self._given, self._turns = turns, self._keep(turns)
        assert self._turns is not None
        tape = self._tapes.get(index)
        if tape is None:
            own = self._result_before(index, x)
            if own is None:
                own = self._input_of(index, x)
            workspace = self._storage.workspace(index)
            tape = self._tapes[index] = _LayerTape(layer, own, self._turns, workspace)
            result = tape.result
        else:
            result = tape.again(x)
        self._last = index, result
        return result

    def _input_of(self, index: int, x: Tensor) -> Tensor:
        """Return memory for the input of layer `index`, with x in it."""
        return self._storage.input_like(index, x).copy_(x.clone())

    def _result_before(self, index: int, x: Tensor) -> Tensor | None:
        """Return the last result if it is x, and not in the workspace of layer `index`."""
        if self._last is None:
            return None
        before, result = self._last
        is_x = (index - before) % 2 == 1 and x.data_ptr() == result.data_ptr()
        return result if is_x else None

    def _keep(self, turns: Turns) -> Turns:
        """Copy cosines and sines to fixed addresses."""
        if self._turns is None:
            return turns[0].clone(), turns[1].clone()
        for fixed, turn in zip(self._turns, turns, strict=True):
            fixed.copy_(turn)
        return self._turns


class PaddedStepMemory(StepMemory):
    """Hold the layout of steps of up to `size` tokens in any rows, up to `MAX_ROWS`.

    The tokens are followed by padding up to `size`, of zeros. It is one more row: nothing of it is
    stored, and it attends to `null_block`, which is zero. Rows that a step does not have are empty.
    """

    def __init__(self, size: int, storage: StepStorage, null_block: int):
        super().__init__([size, *[0] * MAX_ROWS], storage)
        self._size, self._null_block = size, null_block

    def _write(self, batch: PagedBatch, row: Rows, into: Tensor, slot: Tensor) -> None:
        count, tokens = len(row.lengths_B), len(slot)
        # In place: native kernels read starts in each call.
        batch.starts[: count + 1] = row.starts
        batch.starts[count + 1 :] = self._size
        batch.lengths_B[:count] = row.lengths_B
        batch.lengths_B[count] = self._size - tokens
        batch.tables_BM[:count, : row.tables_BM.shape[1]] = row.tables_BM
        batch.tables_BM[count] = self._null_block
        into[:tokens] = slot
        into[tokens:] = NO_SLOT

    def run(self, index: int, layer: Layer, x: Tensor, turns: Turns) -> Tensor:
        """Return `layer(x, turns)` as `StepMemory.run` does, of `[1, N, …]` tensors."""
        return super().run(index, layer, x, turns)[:, : x.shape[1]]

    def _input_of(self, index: int, x: Tensor) -> Tensor:
        own = x.new_empty(1, self._size, *x.shape[2:])
        return _written(self._storage.input_like(index, own), x.clone())

    def _keep(self, turns: Turns) -> Turns:
        fixed = self._storage.turns_of(self._size, turns)
        for into, turn in zip(fixed, turns, strict=True):
            _written(into, turn)
        return fixed


def stays(counts: Sequence[int]) -> bool:
    """Return True if decode steps with exactly these token counts are worth a recording.

    That is a step of few rows, or one row with a draft.
    """
    return len(counts) <= MAX_ROWS and max(counts) <= (MAX_TOKENS if len(counts) == 1 else 1)


def can_pad(counts: Sequence[int], context: int) -> bool:
    """Return True if a recording of a padded step has room for rows of these token counts.

    context: the tokens of the longest sequence, and so of the table of the row that is padding.
    """
    tokens = sum(counts)
    return len(counts) <= MAX_ROWS and padded(tokens) - tokens <= context


def padded(tokens: int) -> int:
    """Return to how many tokens a step is padded: at most 3, or an eighth, more."""
    if tokens <= MAX_EXACT:
        return tokens
    step = max(LEAST_PADDED, (1 << (tokens - 1).bit_length()) // (2 * SIZES_PER_OCTAVE))
    return -(-tokens // step) * step


class _LayerTape:
    """Record one layer's kernel calls, and replay them on a new input."""

    def __init__(self, layer: Layer, x: Tensor, turns: Turns, workspace: Workspace):
        self._x = x
        self._tape = Tape(lambda: layer(x, turns), workspace)
        self.result = self._tape.result

    def again(self, x: Tensor) -> Tensor:
        if x.data_ptr() != self._x.data_ptr():
            _written(self._x, x)
        return self._tape.replay()


def _written(into: Tensor, x: Tensor) -> Tensor:
    """Write x to the beginning of `into` `[1, P, …]`, and zeros behind it; return `into`."""
    tokens = x.shape[1]
    into[:, :tokens] = x
    if tokens < into.shape[1]:
        into[:, tokens:] = 0
    return into
