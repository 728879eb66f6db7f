"""Hold the part of a group's caches that a rank's layers need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.cache.state_cache import StateCache, StateShape

from . import commands as c

Send = Callable[[c.Command], None]


class RankKvCache(KvCache):
    """Hold keys and values of a rank's own layers, in the blocks of all layers' layout.

    own: the layers whose keys and values are here. send: has the other ranks change their blocks,
    too; None on a rank that does not lead.
    """

    def __init__(
        self, shapes: Mapping[int, LayerShape], *args: Any, own: set[int], send: Send | None = None
    ):
        self._own, self._send = own, send
        super().__init__(shapes, *args)

    def holds(self, layer: int) -> bool:
        return layer in self._own

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._send is not None:
            self._send(c.CopyBlocks([*sources], [*targets]))
        super().copy(sources, targets)

    def scrub(self, blocks: Sequence[int]) -> None:
        if self._send is not None:
            self._send(c.ScrubBlocks([*blocks]))
        super().scrub(blocks)


class RankStateCache(StateCache):
    """Hold recurrent states of a rank's own layers; arguments as for `RankKvCache`."""

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        num_running: int,
        num_snapshots: int,
        device: torch.device,
        *,
        own: set[int],
        send: Send | None = None,
    ):
        held = {layer: shape for layer, shape in shapes.items() if layer in own}
        super().__init__(held, num_running, num_snapshots, device)
        self._send, self._is_empty = send, not held

    def scrub(self, slot: int) -> None:
        if self._send is not None:
            self._send(c.ScrubState(slot))
        super().scrub(slot)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if self._send is not None:
            self._send(c.CopyStates([*sources], [*targets]))
        if not self._is_empty:
            super().copy(sources, targets)
