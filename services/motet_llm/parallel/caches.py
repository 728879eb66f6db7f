"""Hold the part of a group's caches that a rank's heads and layers need.

The leader's caches are those that the engine uses: what it changes in its own, the other ranks
change in theirs, and what it hands over to other engines has the heads and layers of all.

Shapes: N tokens, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from motet_kernels.attention.kv_format import row_size
from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.cache.state_cache import StateCache, StateShape

from . import commands as c
from .collectives import GroupFailed
from .cuts.shares import Share, key_heads
from .degrees import Degrees


class Others(Protocol):
    """Define how the leader has the other ranks do what it does."""

    def send(self, command: c.Command) -> None:
        """Have all do it, in order."""

    def ask(self, command: c.Command) -> list[c.Done]:
        """Have all do it, and return their results, by rank."""


class RankKvCache(KvCache):
    """Hold keys and values of a rank's own layers, in the blocks of all layers' layout.

    own: the layers whose keys and values are here.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], *args: Any, own: set[int]):
        self._own_layers = own
        super().__init__(shapes, *args)

    def holds(self, layer: int) -> bool:
        return layer in self._own_layers


class LeaderKvCache(RankKvCache):
    """Change the blocks of all ranks, and hand over the keys and values of all.

    others: the other ranks. heads: of each layer in the whole model. stages: of each layer.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        *args: Any,
        own: set[int],
        others: Others,
        degrees: Degrees,
        heads: Mapping[int, int],
        stages: Mapping[int, int],
    ):
        super().__init__(shapes, *args, own=own)
        self._others, self._degrees = others, degrees
        self._heads, self._stages = heads, stages

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._others.send(c.CopyBlocks([*sources], [*targets]))
        super().copy(sources, targets)

    def scrub(self, blocks: Sequence[int]) -> None:
        self._others.send(c.ScrubBlocks([*blocks]))
        super().scrub(blocks)

    def take_page(self, blocks: int) -> bool:
        """Take a page on all ranks, as long as the leader's own are not all taken."""
        is_taken = super().take_page(blocks)
        if is_taken:
            with suppress(GroupFailed):  # those who watch the group get it
                self._others.send(c.TakePage(blocks))
        return is_taken

    def widths(self, layer: int) -> list[tuple[int, int]]:
        return [(self._heads[layer], dim) for _, dim in super().widths(layer)]

    def collect(self, layer: int, slots_N: Tensor) -> list[Tensor]:
        """Return rows of keys and of values `[N, K, …]` with the heads of all ranks."""
        own = self.pick(layer, slots_N) if self.holds(layer) else None
        done = self._others.ask(c.PickRows(layer, slots_N.tolist()))
        found = [[] if own is None else own, *(self._rows_of(layer, one) for one in done)]
        first = self._stages[layer] * self._degrees.width
        parts = found[first : first + self._degrees.width]
        return [
            torch.cat([part[i] for part in self._distinct(layer, parts)], dim=1)
            for i in range(len(self.widths(layer)))
        ]

    def _rows_of(self, layer: int, done: c.Done) -> list[Tensor]:
        """Return the rows `[N, K, …]` that a rank sent; empty if it does not have the layer."""
        shape = (-1, self._shapes[layer].heads)
        tensors = (torch.frombuffer(bytearray(one), dtype=self.dtype) for one in done.rows)
        widths = super().widths(layer)
        return [
            tensor.view(*shape, row_size(dim, self.dtype))
            for tensor, (_, dim) in zip(tensors, widths, strict=False)
        ]

    def _distinct(self, layer: int, parts: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return the ranks' rows that together have each head once."""
        held = {share: part for share, part in zip(self._shares(layer), parts, strict=True)}
        return [held[share] for share in sorted(held, key=lambda share: share.begin)]

    def _shares(self, layer: int) -> list[Share]:
        """Return the heads of a layer that each rank of its stage has."""
        whole, width = self._heads[layer], self._degrees.width
        if whole == self._shapes[layer].heads:
            return [Share(0, whole)] * width
        return [key_heads(whole, place, width) for place in range(width)]

    def store(self, layer: int, key_NKD: Tensor, value_NKD: Tensor | None, slots_N: Tensor) -> None:
        rows = [key_NKD] if value_NKD is None else [key_NKD, value_NKD]
        for own in self._spread(layer, rows, slots_N, exact=False):
            super().store(layer, own[0], own[1] if len(own) > 1 else None, slots_N)

    def put(self, layer: int, rows: Sequence[Tensor], slots_N: Tensor) -> None:
        for own in self._spread(layer, rows, slots_N, exact=True):
            super().put(layer, own, slots_N)

    def _spread(
        self, layer: int, rows: Sequence[Tensor], slots_N: Tensor, *, exact: bool
    ) -> list[list[Tensor]]:
        """Send each rank its heads of rows `[N, K, …]`; return the leader's own, if it has any."""
        own: list[list[Tensor]] = []
        stage, width = self._stages[layer], self._degrees.width
        parts = [[row[:, s.begin : s.end] for row in rows] for s in self._shares(layer)]
        for place, part in enumerate(parts):
            if (rank := stage * width + place) == 0:
                own.append(part)
                continue
            content = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in part]
            dtype = str(rows[0].dtype).removeprefix("torch.")
            self._others.send(c.PutRows(rank, layer, content, dtype, slots_N.tolist(), exact))
        return own


class RankStateCache(StateCache):
    """Hold recurrent states of a rank's own layers."""

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        num_running: int,
        num_snapshots: int,
        device: torch.device,
        *,
        own: set[int],
    ):
        held = {layer: shape for layer, shape in shapes.items() if layer in own}
        super().__init__(held, num_running, num_snapshots, device)
        self._is_empty = not held

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not self._is_empty:
            super().copy(sources, targets)


class LeaderStateCache(RankStateCache):
    """Change the states of all ranks outside of steps; others: the other ranks."""

    def __init__(self, *args: Any, own: set[int], others: Others):
        self._others = others
        super().__init__(*args, own=own)

    def scrub(self, slot: int) -> None:
        self._others.send(c.ScrubState(slot))
        super().scrub(slot)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._others.send(c.CopyStates([*sources], [*targets]))
        super().copy(sources, targets)


def rows_of(cache: KvCache, command: c.PutRows) -> list[Tensor]:
    """Return the rows `[N, K, …]` of a command, as a rank stores them."""
    dtype, count = getattr(torch, command.dtype), len(command.slots)
    heads = cache.widths(command.layer)[0][0]
    tensors = (torch.frombuffer(bytearray(one), dtype=dtype) for one in command.rows)
    return [tensor.view(count, heads, -1) for tensor in tensors]
