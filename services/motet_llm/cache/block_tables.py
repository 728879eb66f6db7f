"""Manage running requests' block tables: one per group of layers, grown and trimmed by step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from motet_llm.engine.request import Request
from motet_models.capacity import KvGroup, KvLayout
from motet_shared.errors import ConfigError, InternalError

from .block_pool import BlockPool
from .request_blocks import RequestBlocks
from .spill import Spill, Spilled
from .state_cache import StateCache


class BlockTables:
    """Open, grow, trim and close `Request.tables`, and the slot of a request's recurrent state.

    step_tokens: most tokens of one request in one step: what a sliding window's blocks must hold
        beyond the window.
    max_open: most requests with tables at a time.
    keep_all: keep blocks that a window has passed.
    longest_in_pool: tokens of the longest sequence that the pool holds.
    spill: takes the first blocks of sequences longer than the pool; None: there are no such
        sequences.
    """

    def __init__(
        self,
        pool: BlockPool,
        layout: KvLayout,
        *,
        step_tokens: int,
        states: StateCache | None = None,
        max_open: int = 1 << 30,
        keep_all: bool = False,
        spill: Spill | None = None,
    ):
        self.pool = pool
        self.block_size = pool.block_size
        self.max_open = max_open
        if keep_all:
            layout = replace(layout, groups=tuple(KvGroup(group.layers) for group in layout.groups))
        self._layout = layout
        self._groups = layout.groups
        self._step_tokens = step_tokens
        self._states = states
        self._null = pool.num_blocks
        self.longest_in_pool = layout.longest(pool.num_blocks, step_tokens)
        self._spill = spill
        self._whole = [g for g, group in enumerate(self._groups) if group.full_attention]
        self._most_kept = self._most_held = 0
        if spill is not None:
            self._share_pool()

    def _share_pool(self) -> None:
        """Let a longer sequence hold half of the pool, and no less than a step needs.

        Raises ConfigError if the pool does not hold one step.
        """
        size, count = self.block_size, len(self._whole)
        passing = [group for group in self._groups if not group.full_attention]
        passed = sum(group.most_blocks(1 << 40, self._step_tokens, size) for group in passing)
        step = (self._step_tokens + size - 2) // size + 1
        room = (self.pool.num_blocks - passed) // count
        if room < step:
            raise ConfigError(
                f"num_blocks={self.pool.num_blocks}: with long_context a step of token_budget={self._step_tokens} must "
                f"fit; give at least {step * count + passed}, or a smaller token_budget",
                param="num_blocks",
            )
        self._most_kept = max(step, room // 2)  # of each table
        self._most_held = self._most_kept * count + passed  # of all tables

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of that length holds at a time, in all groups."""
        if self.is_long(num_tokens):
            return self._most_held
        return self._layout.blocks_for(num_tokens, self._step_tokens)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest possible sequence."""
        if self._spill is None:
            return self.longest_in_pool
        return max(
            self.longest_in_pool, (self._most_kept // 2 + self._spill.capacity) * self.block_size
        )

    def is_long(self, num_tokens: int) -> bool:
        """Return True if a sequence of so many tokens does not fit into the pool and is spilled."""
        return self._spill is not None and num_tokens > self.longest_in_pool

    def open(self, request: Request) -> None:
        """Give a request empty tables, and a state slot if the model is recurrent."""
        request.blocks = RequestBlocks.empty(len(self._groups))
        if self._states is not None:
            request.blocks.state_slot = self._states.allocate()

    def missing(self, request: Request, num_tokens: int, *, passed: bool = False) -> int:
        """Return the blocks to allocate before the first `num_tokens` tokens have slots.

        passed: do not count blocks that no window reaches any more from the token after them.
        """
        if not passed:
            due = sum(self._length(request, group, num_tokens) for group in self._groups)
            return max(0, due - sum(map(len, request.tables)))
        length = self.pool.blocks_for(num_tokens)
        return sum(
            len(self._visible_blocks(g, t, num_tokens, length))
            for g, t in zip(self._groups, request.tables, strict=True)
        )

    def _length(self, request: Request, group: KvGroup, num_tokens: int) -> int:
        """Return the blocks of a group's table that the first `num_tokens` tokens take."""
        if not group.is_local:
            num_tokens -= request.blocks.num_dropped
        return self.pool.blocks_for(num_tokens)

    def _visible_blocks(
        self, group: KvGroup, table: array[int], num_tokens: int, length: int
    ) -> list[int]:
        """Return the indices beyond a table, up to `length`, that token `num_tokens` still sees."""
        gap = group.gap(num_tokens, self.block_size)
        return [index for index in range(len(table), length) if index not in gap]

    def grow(self, request: Request, num_tokens: int, *, passed: bool = False) -> None:
        """Allocate what is `missing`. Raises InternalError if the pool has less."""
        for group, table in zip(self._groups, request.tables, strict=True):
            length = self._length(request, group, num_tokens)
            if not passed:
                table.extend(self.pool.allocate(max(0, length - len(table))))
                continue
            seen, begin = self._visible_blocks(group, table, num_tokens, length), len(table)
            table.extend([self._null] * max(0, length - begin))
            for index, block in zip(seen, self.pool.allocate(len(seen)), strict=True):
                table[index] = block

    def outstanding(self, request: Request) -> int:
        """Return the blocks that a request will allocate before all of its tokens are computed."""
        if not self.is_long(len(request.tokens)):
            return self.missing(request, len(request.tokens))
        held = sum(block != self._null for table in request.tables for block in table)
        return max(0, self._most_held - held)

    # ------------------------------------------------------------------------------------------------------- spilling
    @property
    def spill_room(self) -> int:
        """Return how many blocks of each table can be spilled."""
        return 0 if self._spill is None else self._spill.num_free

    def to_spill(self, request: Request, num_tokens: int) -> int:
        """Return how many blocks of each table to `spill` before `num_tokens` tokens have slots.

        Many are spilled at a time rather than few at each step.
        """
        if not self.is_long(max(num_tokens, len(request.tokens))):
            return 0
        spilled = _num_spilled(request)
        due = self.pool.blocks_for(num_tokens) - spilled
        if due <= self._most_kept:
            return 0
        return min(due - self._most_kept // 2, request.num_computed // self.block_size - spilled)

    def still_to_spill(self, request: Request) -> int:
        """Return the most blocks of each table yet to spill until all tokens are computed."""
        if not self.is_long(len(request.tokens)):
            return 0
        return max(
            0,
            self.pool.blocks_for(len(request.tokens))
            - self._most_kept // 2
            - _num_spilled(request),
        )

    def spill(self, request: Request, num_tokens: int) -> bool:
        """Spill what is `to_spill`; return False if that fails and the request is lost.

        `RequestBlocks.spilled` has the cause.
        """
        count = self.to_spill(request, num_tokens)
        if self._spill is None or not count:
            return True
        spilled = request.blocks.spilled = request.blocks.spilled or Spilled()
        first = spilled.num_blocks
        self._spill.take(spilled, request.tables, count)
        for g in self._whole:
            table = request.tables[g]
            self.pool.free(table[first : spilled.num_blocks])
            for index in range(first, spilled.num_blocks):
                table[index] = self._null
        return spilled.failure is None

    # ------------------------------------------------------------------------------------------------------- freeing
    def beyond(self, request: Request) -> list[int]:
        """Return the blocks that `cut` frees."""
        tails = (table[length:] for table, length in self._computed(request))
        return [block for tail in tails for block in tail if block != self._null]

    def cut(self, request: Request) -> None:
        """Free what was grown beyond the computed tokens."""
        for table, length in self._computed(request):
            self.pool.free(block for block in reversed(table[length:]) if block != self._null)
            del table[length:]

    def _computed(self, request: Request) -> Iterator[tuple[array[int], int]]:
        """Yield the request's tables, each with the blocks that its computed tokens take."""
        for group, table in zip(self._groups, request.tables, strict=True):
            yield table, self._length(request, group, request.num_computed)

    def drop(self, request: Request, count: int) -> None:
        """Clear the tables of groups that are not local, for prompts that lose `count` tokens."""
        for group, table in zip(self._groups, request.tables, strict=True):
            if not group.is_local:
                self.pool.free(reversed(table))
                del table[:]
        request.blocks.num_dropped = count

    def trim(self, request: Request) -> None:
        """Free the blocks that no window of the request's next token reaches."""
        for g, group in enumerate(self._groups):
            gap = group.gap(request.num_computed, self.block_size)
            table, start = request.tables[g], max(request.blocks.num_released[g], gap.start)
            end = min(gap.stop, len(table))
            passed = [block for block in table[start:end] if block != self._null]
            for index in range(start, end):
                table[index] = self._null
            self.pool.free(passed)
            request.blocks.num_released[g] = max(start, end)

    def close(self, request: Request) -> None:
        """Free all blocks, last ones first, so that the beginnings of prompts are evicted last."""
        for table in request.tables:
            self.pool.free(block for block in reversed(table) if block != self._null)
        held, request.blocks = request.blocks, RequestBlocks()
        if self._spill is not None and held.spilled is not None:
            self._spill.drop(held.spilled)
        if self._states is not None and held.state_slot >= 0:
            self._states.free(held.state_slot)

    def num_freed(self, request: Request, shared: Set[int]) -> int:
        """Return how many blocks would be free without this request, if others take those of `shared`."""
        return sum(
            self.pool.refs(b) == 1
            for table in request.tables
            for b in table
            if b != self._null and b not in shared
        )

    def private_blocks(self, request: Request) -> list[int]:
        """Return the blocks that no other request reads, now or later."""
        held = (block for table in request.tables for block in table if block != self._null)
        return [block for block in held if self.pool.is_private(block)]

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise InternalError unless tables, slots and the pool agree."""
        running = list(running)
        for request in running:
            if any(length > len(table) for table, length in self._computed(request)):
                raise InternalError(
                    f"request {request.key!r}: more tokens computed than its blocks hold"
                )
        self.pool.check_integrity(
            [block for block in table if block != self._null]
            for request in running
            for table in request.tables
        )
        if self._states is not None:
            self._states.check_integrity([request.blocks.state_slot for request in running])
        if self._spill is not None:
            self._check_spilled(running)

    def _check_spilled(self, running: list[Request]) -> None:
        for request in running:
            starts = (request.tables[g][: _num_spilled(request)] for g in self._whole)
            if any(block != self._null for start in starts for block in start):
                raise InternalError(
                    f"request {request.key!r}: a block that was spilled is in the pool, too"
                )
        assert self._spill is not None
        self._spill.check_integrity(
            [r.blocks.spilled for r in running if r.blocks.spilled is not None]
        )


def _num_spilled(request: Request) -> int:
    """Return the spilled blocks at the beginning of each table of layers with full attention."""
    spilled = request.blocks.spilled
    return 0 if spilled is None else spilled.num_blocks
