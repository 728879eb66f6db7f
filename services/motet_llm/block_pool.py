"""Which blocks of the KV cache are free. It hands out numbers; the tensors are `KvCache`'s."""

from __future__ import annotations

from collections.abc import Iterable

from motet_shared.errors import InternalError


class BlockPool:
    """A free list over blocks 0 … num_blocks - 1, last freed first reused (its memory is still in the cache)."""

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks. Raises InternalError if fewer are free: callers look at `num_free` first."""
        if count > len(self._free):
            raise InternalError(f"allocate({count}): only {len(self._free)} of {self.num_blocks} blocks are free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._used[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises InternalError, changing nothing further, at a block that is not in use."""
        for block in blocks:
            if not self._used[block]:
                raise InternalError(f"block {block} was freed twice")
            self._used[block] = 0
            self._free.append(block)

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise InternalError unless `tables` and the free list hold every block exactly once."""
        held = [block for table in tables for block in table]
        if len(set(held)) != len(held):
            raise InternalError(f"a block stands in two block tables: {sorted(held)}")
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise InternalError(f"blocks leaked: {len(held)} held and {len(self._free)} free of {self.num_blocks}")
        if any(not self._used[block] for block in held) or sum(self._used) != len(held):
            raise InternalError("the marks of used blocks disagree with the block tables")
