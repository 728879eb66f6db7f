"""Allocate the block numbers of the KV cache: free, shared or idle; `KvCache` has the tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable

from motet_llm.engine.thread_owner import ThreadOwner
from motet_shared.errors import InternalError


class BlockPool:
    """Count references to blocks 0 … num_blocks - 1 by the block tables that contain them.

    A published block outlives its last table: it becomes *idle* and is reused only when no empty
    block is left, the least recently used first. Idle blocks count as free.

    reached: blocks below which all that were ever allocated are.
    on_evict(block, key): called before an idle block loses its content.
    owner: the threads that may allocate and free; None: any.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        on_evict: Callable[[int, Hashable], None] | None = None,
        owner: ThreadOwner | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = self.reached = 0
        self._on_evict = on_evict
        self._owner = owner
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Return the number of empty and idle blocks."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens, a partly filled one included."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks for one table.

        Raises InternalError if fewer are free: callers check `num_free` first.
        """
        if self._owner is not None:
            self._owner.check()
        if count > self.num_free:
            raise InternalError(
                f"allocate({count}): only {self.num_free} of {self.num_blocks} blocks are free"
            )
        blocks = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        self.reached = max([self.reached - 1, *blocks]) + 1
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._idle))
        if self._on_evict is not None:
            self._on_evict(block, self._keys[block])
        del self._idle[block]
        self._keys[block] = None
        self.evictions += 1
        return block

    def free(self, blocks: Iterable[int]) -> None:
        """Remove blocks from one table.

        Raises InternalError at a block that is in no table, changing nothing further.
        """
        if self._owner is not None:
            self._owner.check()
        for block in blocks:
            if not self._refs[block]:
                raise InternalError(f"block {block} was freed twice")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._keys[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None

    def publish(self, block: int, key: Hashable) -> None:
        """Keep the block's content after its last table, until `on_evict` is called for it."""
        self._keys[block] = key

    def share(self, block: int) -> None:
        """Add a published block to one more table."""
        if not self._refs[block]:
            del self._idle[block]
        self._refs[block] += 1

    def refs(self, block: int) -> int:
        """Return the number of tables that contain the block."""
        return self._refs[block]

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def is_private(self, block: int) -> bool:
        """Return True if the block is in one table only and not published."""
        return self._refs[block] == 1 and self._keys[block] is None

    def check_published(self, block: int | None, key: Hashable) -> None:
        """Raise InternalError if `block` is not published under `key`."""
        if block is not None and self._keys[block] != key:
            raise InternalError(
                f"block {block} is published as something else than the prefix cache says"
            )

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise InternalError unless each block is empty, idle, or in as many tables as counted."""
        held = Counter(block for table in tables for block in table)
        counted = Counter({block: refs for block, refs in enumerate(self._refs) if refs})
        if held != counted:
            wrong = sorted(block for block in held | counted if held[block] != counted[block])
            raise InternalError(
                f"blocks {wrong[:8]} stand in more or fewer block tables than counted"
            )
        if sorted([*held, *self._empty, *self._idle]) != list(range(self.num_blocks)):
            free = f"{len(self._empty)} empty and {len(self._idle)} idle"
            raise InternalError(f"blocks leaked: {len(held)} held, {free} of {self.num_blocks}")
        if any(self._keys[b] is None for b in self._idle) or any(
            self._keys[b] is not None for b in self._empty
        ):
            raise InternalError("an idle block has no content, or an empty one has some")
