"""Find blocks of earlier requests by the tokens that lead to them.

A tree whose edges are the tokens of one block: children are found by the tokens themselves, so no
two prompts share a block by a hash collision. (Image placeholders go by the name of their image:
`Request.names`.) Each adapter has a tree of its own. A node knows the block of each KV group that
holds its tokens, or that the offload tiers have a copy. A match needs, per group, only the blocks
that the next token still sees, not those that a sliding window has passed. Where a prompt leaves
the tree in the middle of a block, that block is copied and used up to there (copy on write). A
model with recurrent layers also needs their state after the last token of the match; its matches
end at nodes with a snapshot of it.

A radix tree at the granularity of blocks, after SGLang's RadixAttention and vLLM's hashed blocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import cast

from torch import Tensor

from motet_llm.engine.request import Request
from motet_shared.errors import InternalError
from motet_shared.text import prefixes

from .block_pool import BlockPool
from .ghost_cache import GhostCache
from .kv_cache import KvCache
from .offload import Offload
from .prefix_tree import Entry, Node, PrefixTree
from .state_cache import StateCache

MAX_SIBLINGS = 16  # children that are compared token by token for a match inside a block
SNAPSHOT_DISTANCE = 512  # tokens of a prompt, at least, from one snapshot of its state to the next
MAX_SNAPSHOTS = 8  # of one prompt, before its end


@dataclass(slots=True)
class Match:
    """Represent a prefix that need not be computed: whole blocks, perhaps part of one more to copy."""

    root: Node
    nodes: list[Node] = field(default_factory=list)
    partial: Node | None = None
    num_partial: int = 0

    @property
    def end(self) -> Node:
        """Return the node below which the request continues."""
        return self.nodes[-1] if self.nodes else self.root


@dataclass(slots=True)
class _RequestPosition:
    """Hold the position of a running request: its first `num_published` blocks end at `node`."""

    node: Node
    num_published: int


def evict_to(
    tree: PrefixTree, kv: KvCache, offload: Offload | None
) -> Callable[[int, Hashable], None]:
    """Return what a pool calls before it reuses a block: it keeps a copy in the offload tiers."""

    def evict(block: int, key: Hashable) -> None:
        node, group = cast(Entry, key)
        if offload is not None:
            offload.store((node, group), lambda: kv.read_block(block))
            node.copies[group] = (node, group) in offload
        node.blocks[group] = None
        tree.prune(node)

    return evict


class PrefixCache:
    """Manage the published blocks of `pool`, which are in `tree`. Called between steps only.

    The pool evicts by `evict_to(tree, …)`, and the tiers drop copies by `tree.drop_copy`.
    """

    def __init__(
        self,
        tree: PrefixTree,
        pool: BlockPool,
        kv: KvCache,
        offload: Offload | None = None,
        states: StateCache | None = None,
    ):
        self._tree = tree
        self._pool = pool
        self._kv = kv
        self._groups = kv.groups
        self._full = [g for g, group in enumerate(kv.groups) if group.full_attention]
        self._offload = offload
        self._states = states
        self._positions: dict[Request, _RequestPosition] = {}

    @property
    def changes(self) -> deque[tuple[int, bool]]:
        """Return the changes not yet reported: (a block's name, whether any of it is held)."""
        return self._tree.changes

    @property
    def ghosts(self) -> GhostCache:
        return self._tree.ghosts

    @property
    def wants_whole_blocks(self) -> bool:
        """Return True if chunks should end at block boundaries, for recurrent states."""
        return self._states is not None

    # ------------------------------------------------------------------------------------------------------- finding
    def match(self, tokens: Sequence[int], root: int = prefixes.ROOT) -> Match:
        """Return the longest cached prefix below `root` that leaves a token or more to compute."""
        size = self._pool.block_size
        path = list(self._path(tokens, root))
        whole = self._usable(path[: (len(tokens) - 1) // size])
        match = Match(self._tree.root(root), path[:whole])
        if self._states is None:
            self._extend(match, tokens[whole * size : len(tokens) - 1])
        return match

    def _path(self, tokens: Sequence[int], root: int) -> Iterator[Node]:
        """Yield the nodes of the whole blocks that `tokens` begin with."""
        size = self._pool.block_size
        node = self._tree.root(root)
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                return
            yield child
            node = child

    def _usable(self, path: list[Node]) -> int:
        """Return the most nodes after which every group has all that the next token sees."""
        size = self._pool.block_size
        usable = 0
        leading = [0] * len(self._groups)  # consecutive present blocks at the beginning, per group
        unbroken = [0] * len(self._groups)  # consecutive present blocks up to here, per group
        for count, node in enumerate(path, start=1):
            unbroken = [run + 1 if node.has(g) else 0 for g, run in enumerate(unbroken)]
            leading = [
                run if run == count else lead for run, lead in zip(unbroken, leading, strict=True)
            ]
            gaps = [group.gap(count * size, size) for group in self._groups]
            is_whole = all(
                run >= count - gap.stop and lead >= min(gap.start, count)
                for run, lead, gap in zip(unbroken, leading, gaps, strict=True)
            )
            if is_whole and (node.has_state or self._states is None):
                usable = count
        return usable

    def _extend(self, match: Match, rest: Sequence[int]) -> None:
        """Find the child whose block shares the most first tokens with `rest`."""
        node = match.end
        for tokens, child in islice(node.children.items(), MAX_SIBLINGS):
            if None in child.blocks:
                continue
            pairs = enumerate(zip(tokens, rest, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(rest)))
            if same > match.num_partial:
                match.partial, match.num_partial = child, same

    def held(self, tokens: Sequence[int], root: int = prefixes.ROOT) -> frozenset[int]:
        """Return blocks in tables that a match shares: sharing them takes no free one.

        These are blocks of full attention, up to the first node that has none in tables: a table
        that holds a block holds those before it. What follows may be long, and is not looked at.
        """
        path = list(takewhile(self._in_tables, self._path(tokens, root)))
        whole = self._usable(path[: (len(tokens) - 1) // self._pool.block_size])
        return frozenset(chain.from_iterable(map(self._in_tables, path[:whole])))

    def _in_tables(self, node: Node) -> list[int]:
        """Return the blocks of a node that are in tables, of groups with full attention."""
        blocks = (node.blocks[g] for g in self._full)
        return [block for block in blocks if block is not None and not self._pool.is_idle(block)]

    def _needed(self, match: Match) -> Iterator[Entry]:
        covered = len(match.nodes) * self._pool.block_size
        for g, group in enumerate(self._groups):
            gap = group.gap(covered, self._pool.block_size)
            yield from ((node, g) for index, node in enumerate(match.nodes) if index not in gap)

    # -------------------------------------------------------------------------------------------------------- taking
    def take(self, request: Request, match: Match) -> None:
        """Give a request without blocks those of the match; computing continues after them.

        Copies from the offload tiers are verified; where one is damaged, a shorter match is taken
        and the rest computed again.
        """
        while (fetched := self._fetch(match)) is None:
            match = self.match(request.matchable, request.root)
        # Pin before evicting: an eviction may drop a node's last copy, and the node with it.
        self._move(request, match.end, len(match.nodes))
        for node, g in self._needed(match):
            if (block := node.blocks[g]) is not None:
                self._pool.share(block)
        if match.partial is not None:
            self._share_partial(match, len(fetched))
        self._restore(fetched)
        size = self._pool.block_size
        for g, group in enumerate(self._groups):
            gap = group.gap(len(match.nodes) * size, size)
            blocks = (
                self._kv.null_block if i in gap else node.blocks[g]
                for i, node in enumerate(match.nodes)
            )
            request.tables[g].extend(cast(Iterator[int], blocks))
        request.num_computed = len(match.nodes) * size + self._copy_partial(match, request.tables)
        if match.nodes and self._states is not None:
            self._states.restore(match.nodes[-1], request.blocks.state_slot)
        self.ghosts.count(match.end.name, request.names[len(match.nodes) * size :], size)

    def _fetch(self, match: Match) -> dict[Entry, Tensor] | None:
        """Load what only the tiers have of the match; None if some of it is damaged."""
        fetched: dict[Entry, Tensor] = {}
        for node, g in self._needed(match):
            if node.blocks[g] is None:
                content = self._offload.load((node, g)) if self._offload is not None else None
                if content is None:
                    return None
                fetched[node, g] = content
        return fetched

    def _share_partial(self, match: Match, fetched: int) -> None:
        """Hold the partial block, or drop it from the match if its copy does not fit.

        Besides its copies, one in each group, there must be room for `fetched` blocks.
        """
        blocks = cast(list[int], cast(Node, match.partial).blocks)
        if self._pool.num_free < fetched + len(blocks) + sum(map(self._pool.is_idle, blocks)):
            match.partial, match.num_partial = None, 0
            return
        for block in blocks:
            self._pool.share(block)

    def _restore(self, fetched: dict[Entry, Tensor]) -> None:
        blocks = []
        for node, group in fetched:
            (block,) = self._pool.allocate(1)
            self._pool.publish(block, (node, group))
            node.blocks[group] = block
            self._tree.note(node)
            blocks.append(block)
        self._kv.write_blocks(blocks, list(fetched.values()))

    def _copy_partial(self, match: Match, tables: list[array[int]]) -> int:
        if match.partial is None:
            return 0
        sources = cast(list[int], match.partial.blocks)
        targets = self._pool.allocate(len(sources))
        self._kv.copy(sources, targets)
        self._pool.free(sources)
        for table, target in zip(tables, targets, strict=True):
            table.append(target)
        return match.num_partial

    # ----------------------------------------------------------------------------------------------------- publishing
    def publish(self, request: Request, num_new: int = 0) -> None:
        """Make the blocks findable that the request has filled since the last call.

        num_new: tokens that the last step computed for it; the recurrent state after them is kept
            if a match is likely to end there.
        """
        if request.blocks.num_dropped:
            return  # later blocks depend on a compressed prompt
        size = self._pool.block_size
        position = self._positions.get(request)
        node = self._tree.root(request.root) if position is None else position.node
        num_whole = request.num_computed // size
        for index in range(0 if position is None else position.num_published, num_whole):
            tokens = tuple(request.names[index * size : (index + 1) * size])
            child = node.children.get(tokens)
            if child is None:
                child = self._tree.add(node, tokens)
            for g, table in enumerate(request.tables):
                block = table[index]
                is_whole = (
                    block != self._kv.null_block and index * size >= request.blocks.whole_from[g]
                )
                if child.blocks[g] is None and is_whole and self._pool.is_private(block):
                    child.blocks[g] = block
                    self._pool.publish(block, (child, g))
            self._tree.note(child)
            node = child
        if position is None or num_whole > position.num_published:
            self._move(request, node, num_whole)
        if self._states is not None and self._keeps_state(request, num_new):
            self._snapshot(self._states, request, node)

    def _keeps_state(self, request: Request, num_new: int) -> bool:
        """Return True if the recurrent state after a step of `num_new` tokens is to be kept.

        It is large, and each snapshot drops one of another prompt: a prompt keeps that after its
        last whole block, where the next turn of a conversation continues, and few before it.
        """
        size = self._pool.block_size
        before, end = (request.num_computed - num_new) // size, request.num_computed // size
        distance = max(SNAPSHOT_DISTANCE // size, len(request.tokens) // size // MAX_SNAPSHOTS, 1)
        is_last = request.num_uncomputed <= size
        is_whole = request.num_computed == end * size > 0
        return num_new > 1 and is_whole and (is_last or end // distance > before // distance)

    def _snapshot(self, states: StateCache, request: Request, node: Node) -> None:
        """Keep a copy of a request's recurrent state, and drop the oldest one if need be."""
        dropped = states.snapshot(request.blocks.state_slot, node)
        node.has_state = states.has(node)
        if dropped is not None:
            old = cast(Node, dropped)
            old.has_state = False
            self._tree.prune(old)

    def release(self, request: Request) -> None:
        """Unpin a request's node, before its blocks are freed."""
        position = self._positions.pop(request, None)
        if position is not None:
            position.node.pins -= 1
            self._tree.prune(position.node)

    def _move(self, request: Request, node: Node, num_published: int) -> None:
        """Pin the node below which the request's next block belongs, and unpin the one before."""
        node.pins += 1
        self.release(request)
        self._positions[request] = _RequestPosition(node, num_published)

    def __len__(self) -> int:
        """Return the number of nodes without the roots."""
        return len(self._tree)

    def check_integrity(self) -> None:
        """Raise InternalError if tree and pool disagree.

        Walks the whole tree: for tests and idle engines.
        """
        for node in self._tree.nodes():
            for g, block in enumerate(node.blocks):
                self._pool.check_published(block, (node, g))
                if node.copies[g] != (self._offload is not None and (node, g) in self._offload):
                    raise InternalError(f"prefix cache: copy of block {block} is not as recorded")
            if node.has_state != (self._states is not None and self._states.has(node)):
                raise InternalError(
                    "prefix cache: snapshot of a recurrent state is not as recorded"
                )
