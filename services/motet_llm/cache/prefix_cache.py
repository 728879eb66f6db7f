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
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from motet_llm.engine.request import Request
from motet_shared.text import prefixes

from .block_pool import BlockPool
from .ghost_cache import GhostCache
from .kv_cache import KvCache
from .offload import Offload
from .state_cache import StateCache

_MOST_CHANGES = 1 << 20  # changes kept until they are reported
MAX_SIBLINGS = 16  # children that are compared token by token for a match inside a block


class Node:
    """Represent the tokens of one block, after those of its ancestors.

    pins: requests whose next block belongs below the node.
    called: its name, by `prefixes`.
    told: whether the node was last reported as held.
    """

    __slots__ = ("blocks", "called", "children", "parent", "pins", "tokens", "told")

    def __init__(
        self,
        parent: Node | None,
        tokens: tuple[int, ...],
        num_groups: int,
        root: int = prefixes.ROOT,
    ):
        self.parent = parent
        self.tokens = tokens
        self.children: dict[tuple[int, ...], Node] = {}
        self.blocks: list[int | None] = [None] * num_groups
        self.pins = 0
        self.called: int = root if parent is None else prefixes.chained(parent.called, tokens)
        self.told = False


Entry = tuple[Node, int]  # a node and the index of a KV group


@dataclass(slots=True)
class Match:
    """A prefix that need not be computed: whole blocks, perhaps part of one more to copy."""

    root: Node
    nodes: list[Node] = field(default_factory=list)
    partial: Node | None = None
    num_partial: int = 0

    @property
    def end(self) -> Node:
        """Return the node below which the request continues."""
        return self.nodes[-1] if self.nodes else self.root


class PrefixCache:
    """Manage the published blocks of `pool`. Called between steps only.

    changes: appended to as blocks come and go: (a block's name, whether any of it is held).
    """

    def __init__(
        self,
        pool: BlockPool,
        kv: KvCache,
        offload: Offload | None = None,
        states: StateCache | None = None,
    ):
        self._pool = pool
        self._kv = kv
        self._groups = kv.groups
        self._offload = offload
        self._states = states
        self._roots: dict[int, Node] = {}
        self.changes: deque[tuple[int, bool]] = deque(maxlen=_MOST_CHANGES)
        self.ghosts = GhostCache(pool.num_blocks)
        pool.on_evict = self._on_evict
        if offload is not None:
            offload.on_drop = lambda key: self._prune(cast(Entry, key)[0])
        if states is not None:
            states.on_drop = lambda node: self._prune(cast(Node, node))

    @property
    def wants_whole_blocks(self) -> bool:
        """Return True if chunks should end at block boundaries, for recurrent states."""
        return self._states is not None

    # ------------------------------------------------------------------------------------------------------- finding
    def match(self, tokens: Sequence[int], root: int = prefixes.ROOT) -> Match:
        """Return the longest cached prefix below `root` that leaves a token or more to compute."""
        size = self._pool.block_size
        path: list[Node] = []
        node = top = self._top(root)
        for start in range(0, len(tokens) - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        whole = self._usable(path[: (len(tokens) - 1) // size])
        match = Match(top, path[:whole])
        if self._states is None:
            self._extend(match, tokens[whole * size : len(tokens) - 1])
        return match

    def _top(self, root: int) -> Node:
        """Return the root node of a tree, created when first used."""
        if root not in self._roots:
            self._roots[root] = Node(None, (), len(self._groups), root)
        return self._roots[root]

    def _usable(self, path: list[Node]) -> int:
        """Return the most nodes after which every group has all that the next token sees."""
        size = self._pool.block_size
        usable = 0
        leading = [0] * len(self._groups)  # consecutive present blocks at the beginning, per group
        unbroken = [0] * len(self._groups)  # consecutive present blocks up to here, per group
        for count, node in enumerate(path, start=1):
            unbroken = [run + 1 if self._has(node, g) else 0 for g, run in enumerate(unbroken)]
            leading = [
                run if run == count else lead for run, lead in zip(unbroken, leading, strict=True)
            ]
            gaps = [group.gap(count * size, size) for group in self._groups]
            is_whole = all(
                run >= count - gap.stop and lead >= min(gap.start, count)
                for run, lead, gap in zip(unbroken, leading, gaps, strict=True)
            )
            if is_whole and self._has_state(node):
                usable = count
        return usable

    def _extend(self, match: Match, rest: Sequence[int]) -> None:
        """Find the child whose block shares the most first tokens with `rest`."""
        node = match.end
        for tokens, child in list(node.children.items())[:MAX_SIBLINGS]:
            if None in child.blocks:
                continue
            pairs = enumerate(zip(tokens, rest, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(rest)))
            if same > match.num_partial:
                match.partial, match.num_partial = child, same

    def _has(self, node: Node, group: int) -> bool:
        return node.blocks[group] is not None or (
            self._offload is not None and (node, group) in self._offload
        )

    def _has_state(self, node: Node) -> bool:
        return self._states is None or self._states.has(node)

    def num_held(self, match: Match) -> int:
        """Return how many of the match's blocks are in tables: sharing them takes no free one."""
        blocks = (node.blocks[g] for node, g in self._needed(match))
        return sum(block is not None and not self._pool.is_idle(block) for block in blocks)

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
            match = self.match(request.findable, request.root)
        # Pin before evicting: an eviction may drop a node's last copy, and the node with it.
        self._pin(request, match.end)
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
            self._states.restore(match.nodes[-1], request.state_slot)
        request.num_published = len(match.nodes)
        self.ghosts.count(match.end.called, request.names[len(match.nodes) * size :], size)

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
            self._tell(node)
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
    def publish(self, request: Request, keep_state: bool = False) -> None:
        """Make the blocks findable that the request has filled since the last call.

        keep_state: also snapshot the recurrent state, if it is that after a whole block. It is
            large, so not after every step.
        """
        if request.left_out:
            return  # later blocks depend on a compressed prompt
        size = self._pool.block_size
        node = request.node or self._top(request.root)
        for index in range(request.num_published, request.num_computed // size):
            tokens = tuple(request.names[index * size : (index + 1) * size])
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = Node(node, tokens, len(self._groups))
            for g, table in enumerate(request.tables):
                block = table[index]
                is_whole = block != self._kv.null_block and index * size >= request.whole_from[g]
                if child.blocks[g] is None and is_whole and self._pool.is_private(block):
                    child.blocks[g] = block
                    self._pool.publish(block, (child, g))
            self._tell(child)
            node = child
            request.num_published = index + 1
        self._pin(request, node)
        if (
            keep_state
            and self._states is not None
            and request.num_computed == request.num_published * size > 0
        ):
            self._states.snapshot(request.state_slot, node)

    def release(self, request: Request) -> None:
        """Unpin a request's node, before its blocks are freed."""
        self._pin(request, None)

    def _pin(self, request: Request, node: Node | None) -> None:
        old = request.node
        if node is not None:
            node.pins += 1
        request.node = node
        if old is not None:
            old.pins -= 1
            self._prune(old)

    # ----------------------------------------------------------------------------------------------------- forgetting
    def _on_evict(self, block: int, key: Hashable) -> None:
        node, group = cast(Entry, key)
        if self._offload is not None:
            self._offload.store((node, group), lambda: self._kv.read_block(block))
        node.blocks[group] = None
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove nodes that hold nothing from the tree, starting at `node`."""
        self._tell(node)
        while node.parent is not None and not (
            node.children or node.pins or self._holds_something(node)
        ):
            if node.parent.children.get(node.tokens) is node:
                del node.parent.children[node.tokens]
            node = node.parent

    def _tell(self, node: Node) -> None:
        """Record a change if the first part of a node has come, or the last one gone."""
        held = self._holds_something(node)
        if held != node.told and node.parent is not None:
            node.told = held
            self.changes.append((node.called, held))
            self.ghosts.note(node.called, held)

    def _holds_something(self, node: Node) -> bool:
        has_block = any(self._has(node, g) for g in range(len(self._groups)))
        return has_block or (self._states is not None and self._states.has(node))

    def __len__(self) -> int:
        """Return the number of nodes without the roots."""
        count, open_nodes = -len(self._roots), [*self._roots.values()]
        while open_nodes:
            count += 1
            open_nodes += open_nodes.pop().children.values()
        return count

    def check_integrity(self) -> None:
        """Raise InternalError if tree and pool disagree.

        Walks the whole tree: for tests and idle engines.
        """
        open_nodes = [*self._roots.values()]
        while open_nodes:
            node = open_nodes.pop()
            open_nodes += node.children.values()
            for g, block in enumerate(node.blocks):
                self._pool.check_published(block, (node, g))
