"""Hold the tree of blocks that the prefix cache finds by their tokens.

The tree knows what is held of each block, and forgets nodes of which nothing is held. It moves no
data: `prefix_cache` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import cast

from motet_shared.text import prefixes

from .ghost_cache import GhostCache

_MOST_CHANGES = 1 << 20  # changes kept until they are reported


class Node:
    """Represent the tokens of one block, after those of its ancestors.

    blocks: by KV group, the block of the pool that holds its tokens; None: none.
    copies: by KV group, whether the offload tiers hold a copy.
    has_state: whether there is a snapshot of the recurrent state after its tokens.
    pins: requests whose next block belongs below the node.
    name: its name, by `prefixes`.
    was_held: whether the last change reported it as held.
    """

    __slots__ = (
        "blocks",
        "children",
        "copies",
        "has_state",
        "name",
        "parent",
        "pins",
        "tokens",
        "was_held",
    )

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
        self.copies = [False] * num_groups
        self.has_state = False
        self.pins = 0
        self.name: int = root if parent is None else prefixes.chained(parent.name, tokens)
        self.was_held = False

    def has(self, group: int) -> bool:
        """Return True if the pool or the offload tiers hold the block of a KV group."""
        return self.blocks[group] is not None or self.copies[group]

    @property
    def is_held(self) -> bool:
        """Return True if anything of the node is held."""
        return self.has_state or any(map(self.has, range(len(self.blocks))))


Entry = tuple[Node, int]  # a node and the index of a KV group


class PrefixTree:
    """Keep one tree of nodes per root, for a model with `num_groups` KV groups.

    changes: appended to as blocks come and go: (a block's name, whether any of it is held).
    ghosts: names of evicted blocks, of a pool of `num_blocks`.
    """

    def __init__(self, num_groups: int, num_blocks: int):
        self.changes: deque[tuple[int, bool]] = deque(maxlen=_MOST_CHANGES)
        self.ghosts = GhostCache(num_blocks)
        self._num_groups = num_groups
        self._roots: dict[int, Node] = {}

    def root(self, name: int) -> Node:
        """Return the root node of a tree, created when first used."""
        if name not in self._roots:
            self._roots[name] = Node(None, (), self._num_groups, name)
        return self._roots[name]

    def add(self, parent: Node, tokens: tuple[int, ...]) -> Node:
        """Return a new child of `parent`, of which nothing is held yet."""
        node = parent.children[tokens] = Node(parent, tokens, self._num_groups)
        return node

    def drop_copy(self, key: Hashable) -> None:
        """Record that the last copy of an `Entry` in the offload tiers is gone."""
        node, group = cast(Entry, key)
        node.copies[group] = False
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Remove nodes of which nothing is held, starting at `node`, towards the root."""
        self.note(node)
        while node.parent is not None and not (node.children or node.pins or node.is_held):
            if node.parent.children.get(node.tokens) is node:
                del node.parent.children[node.tokens]
            node = node.parent

    def note(self, node: Node) -> None:
        """Record a change if the first part of a node has come, or the last one gone."""
        is_held = node.is_held
        if is_held != node.was_held and node.parent is not None:
            node.was_held = is_held
            self.changes.append((node.name, is_held))
            self.ghosts.note(node.name, is_held)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, roots included."""
        open_nodes = [*self._roots.values()]
        while open_nodes:
            node = open_nodes.pop()
            open_nodes += node.children.values()
            yield node

    def __len__(self) -> int:
        """Return the number of nodes without the roots."""
        return sum(1 for _ in self.nodes()) - len(self._roots)
