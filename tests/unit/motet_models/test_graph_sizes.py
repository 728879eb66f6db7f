"""Sizes of CUDA graphs: every step within their limits has one, and none is larger than the limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from motet_models.graph_sizes import (
    DRIVER_BYTES,
    MOST_KEYS,
    TOKENS,
    GraphSize,
    StepShape,
    graph_bytes,
    graph_sizes,
    size_for,
)

STEP = StepShape(
    hidden=4096, widest=28_672, vocab=128_256, elements=2048, groups=1, element_bytes=2
)


@pytest.mark.parametrize("max_running", [1, 6, 64, 300])
@pytest.mark.parametrize("context", [100, 4096, 131_072])
def test_a_step_takes_the_smallest_size_that_holds_it(max_running: int, context: int) -> None:
    sizes = graph_sizes(max_running, context, 16)
    longest = -(-context // 16)
    assert sizes == sorted(set(sizes))
    assert all(size.rows * size.blocks * 16 <= MOST_KEYS for size in sizes)
    for rows in range(1, min(max_running, 256) + 1):
        found = size_for(sizes, rows, min(TOKENS[0] // 16, longest))
        assert found is not None
        assert rows <= found.rows < 2 * rows or found.rows == max_running
    assert size_for(sizes, 1, longest) == GraphSize(1, longest)
    assert size_for(sizes, max_running + 1, 1) is None
    assert size_for(sizes, 1, longest + 1) is None


def test_memory_grows_with_what_is_captured() -> None:
    few, many = graph_sizes(8, 4096, 16), graph_sizes(64, 131_072, 16)
    assert 0 == graph_bytes([], STEP, 16) < graph_bytes(few, STEP, 16) < graph_bytes(many, STEP, 16)
    wide = replace(STEP, elements=4096)
    assert graph_bytes(many, wide, 16) > graph_bytes(many, STEP, 16)
    # One row of one block: results, intermediates, and what the driver keeps; inputs are less than a KiB.
    lone = graph_bytes([GraphSize(1, 1)], STEP, 16)
    rows = 8 * STEP.vocab + (5 * STEP.hidden + 2 * STEP.widest) * 2
    assert 0 < lone - rows - DRIVER_BYTES < 1024
