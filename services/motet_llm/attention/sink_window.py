"""Build a step's rows for layers that see only some blocks of sequences.

They see the first and the most recent blocks, or those of the chunk in which a token is. Keys are
stored rotated, so attention need not know that something was left out: a block table without those
blocks suffices. The queries of each block (or of each chunk of a layer) form a row of their own,
because each sees other blocks; so what a token sees does not depend on how its prompt was divided
into steps.

Attention sinks with a window, after Xiao et al., "Efficient Streaming Language Models with
Attention Sinks", 2023; here with whole blocks and the tokens' original positions.

Shapes: B rows, M blocks per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from motet_models.capacity import KvGroup


@dataclass(frozen=True, slots=True)
class Rows:
    """Hold what makes a `PagedBatch`: tables `[B, M]`, B + 1 cumulative query counts, key counts."""

    tables_BM: Tensor
    starts: Tensor
    lengths_B: Tensor

    @classmethod
    def of(cls, tables_BM: np.ndarray, starts: Iterable[int], lengths: Iterable[int]) -> Rows:
        counts = (torch.tensor(list(numbers), dtype=torch.int32) for numbers in (starts, lengths))
        return cls(torch.from_numpy(tables_BM), *counts)

    def only(self, rows: Sequence[int]) -> Rows:
        """Return some of the rows, in this order, packed without the others."""
        counts_B = self.starts.diff()[list(rows)]
        starts = torch.cat((self.starts[:1], counts_B.cumsum(0, dtype=torch.int32)))
        return Rows(self.tables_BM[list(rows)], starts, self.lengths_B[list(rows)])


def rows_by_group(
    groups: Sequence[KvGroup],
    block_size: int,
    tables: Sequence[np.ndarray],
    spans: Sequence[tuple[int, int]],
    left_out_B: np.ndarray | None = None,
) -> list[Rows]:
    """Return for each group of layers the rows with which the tokens of `spans` attend.

    tables: by group `[B, M]`, one row per sequence, all of its blocks.
    spans: for each sequence, its first token in this step and the one after its last.
    left_out_B: tokens of each sequence that are in no block of groups without a window
        (`RequestBlocks.num_dropped`).
    """
    starts = accumulate((stop - start for start, stop in spans), initial=0)
    whole = Rows.of(tables[0], starts, (stop for _, stop in spans))
    left = (
        whole
        if left_out_B is None
        else replace(whole, lengths_B=whole.lengths_B - torch.from_numpy(left_out_B))
    )
    return [
        replace(left if group.window is None else whole, tables_BM=torch.from_numpy(tables_BM))
        if group.sink_window is None and group.chunk is None
        else _cut_rows(group, block_size, tables_BM, spans)
        for group, tables_BM in zip(groups, tables, strict=True)
    ]


def _cut_rows(
    group: KvGroup, block_size: int, tables_BM: np.ndarray, spans: Sequence[tuple[int, int]]
) -> Rows:
    """Return a row for each part of a span within which all queries have the same gap."""
    size = group.chunk or block_size
    tables: list[np.ndarray] = []
    starts, lengths = [0], []
    for table, (start, stop) in zip(tables_BM, spans, strict=True):
        for part in range(start // size, -(-stop // size)):
            end = min(stop, (part + 1) * size)
            whole = -(-end // block_size)
            seen = np.delete(table[:whole], group.gap(part * size, block_size))
            tables.append(seen)
            starts.append(starts[-1] + end - max(start, part * size))
            lengths.append(len(seen) * block_size - whole * block_size + end)
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, seen in zip(padded, tables, strict=True):
        row[: len(seen)] = seen
    return Rows.of(padded, starts, lengths)
