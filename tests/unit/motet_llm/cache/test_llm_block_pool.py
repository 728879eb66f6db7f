"""The block pool against a plain set."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet_llm.cache.block_pool import BlockPool
from motet_shared.errors import InternalError

SIZE = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables take, share and give blocks in any order; the pool always knows where each block is."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE, block_size=4, on_evict=self._evicted)
        self.tables: list[list[int]] = []
        self.published: dict[int, str] = {}
        self.keys = 0

    def _evicted(self, block: int, key: Hashable) -> None:
        assert self.published.pop(block) == key
        assert block not in self._held()

    def _held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @rule(count=st.integers(0, SIZE))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(InternalError, match=f"{free} of {SIZE}"):
                self.pool.allocate(count)
            return
        idle = SIZE - len(self._held() | self.published.keys())
        before = len(self.published)
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & self._held()
        assert before - len(self.published) == max(0, count - idle), (
            "content is lost only when nothing is empty"
        )
        self.tables.append(blocks)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self._held())))
        if self.pool.is_private(block):
            self.keys += 1
            self.published[block] = f"key {self.keys}"
            self.pool.publish(block, f"key {self.keys}")

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.published)))
        self.pool.share(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(range(SIZE)) - self._held())))
        with pytest.raises(InternalError, match=rf"block {block}\b"):
            self.pool.free([block])

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity(self.tables)
        held = self._held()
        assert self.pool.num_free == SIZE - len(held)
        assert self.pool.num_idle == len(self.published.keys() - held)
        for block in range(SIZE):
            assert self.pool.refs(block) == sum(block in table for table in self.tables)
            self.pool.check_published(
                block if block in self.published else None, self.published.get(block)
            )


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30)


def test_the_least_recently_freed_content_goes_first() -> None:
    gone: list[Hashable] = []
    pool = BlockPool(3, block_size=4, on_evict=lambda block, key: gone.append(key))
    blocks = pool.allocate(3)
    for block, key in zip(blocks, "abc", strict=True):
        pool.publish(block, key)
    pool.free([blocks[1], blocks[0], blocks[2]])
    pool.share(blocks[1])
    pool.free([blocks[1]])
    pool.allocate(2)
    assert gone == ["a", "c"]
    with pytest.raises(InternalError):
        pool.check_published(blocks[1], "a")


@given(tokens=st.integers(0, 1000), block_size=st.integers(1, 64))
def test_blocks_for_is_the_least_that_holds_the_tokens(tokens: int, block_size: int) -> None:
    blocks = BlockPool(1, block_size).blocks_for(tokens)
    assert blocks * block_size >= tokens > (blocks - 1) * block_size


@pytest.mark.parametrize(
    ("tables", "blocks"),
    [
        ([[0, 1], [1]], r"\[1\]"),
        ([[0]], r"\[1\]"),
        ([[0, 1, 2]], r"\[2\]"),
    ],
)
def test_check_integrity_finds_what_is_wrong(tables: list[list[int]], blocks: str) -> None:
    pool = BlockPool(4, block_size=4)
    assert sorted(pool.allocate(2)) == [0, 1]
    with pytest.raises(InternalError, match=blocks):
        pool.check_integrity(tables)
