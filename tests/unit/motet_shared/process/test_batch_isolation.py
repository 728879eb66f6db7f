"""Batches that fail: results of all items but those that fail alone, at a bounded price."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from motet_shared.process.batch_isolation import computed


@pytest.mark.parametrize("bad", [(), (0,), (6,), (2, 3), tuple(range(7))])
def test_items_that_fail_alone_have_their_error(bad: tuple[int, ...]) -> None:
    calls: list[int] = []

    def compute(items: Sequence[int]) -> list[int]:
        calls.append(len(items))
        if any(item in bad for item in items):
            raise ValueError(items[0])
        return [item * 10 for item in items]

    found = computed(compute, range(7))
    assert [one for one in found if not isinstance(one, Exception)] == [
        item * 10 for item in range(7) if item not in bad
    ]
    failed = [item for item, one in enumerate(found) if isinstance(one, ValueError)]
    assert tuple(failed) == bad
    assert len(calls) <= 1 + 2 * 3 * len(bad)


def test_a_batch_that_is_too_large_is_computed_in_parts() -> None:
    def compute(items: Sequence[int]) -> list[int]:
        if len(items) > 2:
            raise MemoryError
        return [*items]

    assert computed(compute, range(9)) == [*range(9)]
    assert computed(compute, []) == []
