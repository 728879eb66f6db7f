"""Choose the sizes of decode steps that are captured as CUDA graphs, and compute their memory.

A graph computes a fixed number of rows, one token each, with block tables of a fixed width. A step
takes the smallest graph that holds it. Rows are powers of two. Widths are few, because the launch
of attention, and what its parts write, grow with them; rows times width are bounded for the same
reason, and beyond that a step takes so long that launching its kernels one by one costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOKENS = (2048, 8192, 32_768, 131_072)  # widths of block tables, in tokens
MOST_KEYS = 1 << 19  # rows times tokens of a graph
SEGMENT = 512  # keys that one program of attention sums up (kernels/motet_kernels/gpu/attention)
LINES = 16  # queries of such a program, at least; the others are padding
# What the driver keeps for the kernels of one graph: an assumption, not measured.
DRIVER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, order=True)
class GraphSize:
    """Hold the rows of a graph, and the blocks of each row's table."""

    rows: int
    blocks: int

    def holds(self, rows: int, blocks: int) -> bool:
        """Return True if a step of so many rows, of up to so many blocks, fits."""
        return rows <= self.rows and blocks <= self.blocks


def graph_sizes(max_running: int, context: int, block_size: int) -> list[GraphSize]:
    """Return all sizes for up to `max_running` sequences of `context` tokens, the smallest first."""
    rows, most = [], 1
    while most < max_running:
        rows.append(most)
        most *= 2
    rows.append(max_running)
    longest = -(-context // block_size)
    widths = sorted({min(-(-tokens // block_size), longest) for tokens in TOKENS})
    return sorted(
        GraphSize(count, blocks)
        for count in rows
        for blocks in widths
        if count * blocks * block_size <= MOST_KEYS
    )


def size_for(sizes: Sequence[GraphSize], rows: int, blocks: int) -> GraphSize | None:
    """Return the first of the sizes that holds a step; None if it is larger than all of them."""
    return next((size for size in sizes if size.holds(rows, blocks)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Describe what a decode step computes per row.

    widest: largest row of activations inside a layer. elements: numbers per token in the cache of
    the largest layer. groups: of layers with a block table of their own. element_bytes: of a number.
    """

    hidden: int
    widest: int
    vocab: int
    elements: int
    groups: int
    element_bytes: int


def graph_bytes(sizes: Sequence[GraphSize], step: StepShape, block_size: int) -> int:
    """Return the most bytes that graphs of these sizes take together.

    They share the memory of their intermediates, which is that of the largest, and of their
    results. Each has its own inputs, and what the driver keeps of it.
    """
    if not sizes:
        return 0
    rows = max(size.rows for size in sizes)
    results = rows * (4 * step.vocab + step.hidden * step.element_bytes)
    inputs = sum(size.rows * (size.blocks + 16) * 4 * step.groups for size in sizes)
    between = max(size.rows * _row_bytes(size, step, block_size) for size in sizes)
    return results + inputs + between + len(sizes) * DRIVER_BYTES


def _row_bytes(size: GraphSize, step: StepShape, block_size: int) -> int:
    """Return the bytes of one row's intermediates: activations, parts of attention, and logits."""
    segments = -(-size.blocks * block_size // SEGMENT)
    parts = segments * LINES * step.elements * 4 if segments > 1 else 0
    return (4 * step.hidden + 2 * step.widest) * step.element_bytes + parts + 4 * step.vocab
