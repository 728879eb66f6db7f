"""The block pool against a plain set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet_llm.block_pool import BlockPool
from motet_shared.errors import InternalError

SIZE = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables take and give blocks in any order; the pool always knows where each block is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE, block_size=4)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(InternalError, match=f"only {free} of {SIZE}"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for table in self.tables for block in table}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        held = {block for table in self.tables for block in table}
        block = data.draw(st.sampled_from(sorted(set(range(SIZE)) - held)))
        with pytest.raises(InternalError, match=f"block {block} was freed twice"):
            self.pool.free([block])

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == SIZE - sum(map(len, self.tables))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@given(tokens=st.integers(0, 1000), block_size=st.integers(1, 64))
def test_blocks_for_is_the_least_that_holds_the_tokens(tokens: int, block_size: int) -> None:
    blocks = BlockPool(1, block_size).blocks_for(tokens)
    assert blocks * block_size >= tokens > (blocks - 1) * block_size


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([[0, 1], [1]], "two block tables"),
        ([[0]], "leaked"),
        ([[0, 1, 2]], "leaked"),
    ],
)
def test_check_integrity_finds_what_is_wrong(tables: list[list[int]], complaint: str) -> None:
    pool = BlockPool(4, block_size=4)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(InternalError, match=complaint):
        pool.check_integrity(tables)
