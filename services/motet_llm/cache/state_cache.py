"""Keep states of recurrent layers: a slot per running sequence, and snapshots of prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels.attention.blocks import Blocks
from motet_shared.errors import InternalError


@dataclass(frozen=True, slots=True)
class StateShape:
    """Hold shapes and type of the tensors that one recurrent layer keeps per sequence."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize


class StateCache:
    """Keep `num_running` slots for sequences and `num_snapshots` for prefixes.

    The least recently used snapshot is dropped first.
    """

    def __init__(
        self,
        layers: Mapping[int, StateShape],
        num_running: int,
        num_snapshots: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ):
        slots = num_running + num_snapshots
        self._layers = {
            layer: tuple(
                torch.zeros(slots, *s, dtype=shape.dtype, device=device) for s in shape.shapes
            )
            for layer, shape in layers.items()
        }
        self._slots = Blocks([tensor for tensors in self._layers.values() for tensor in tensors])
        self._num_running = num_running
        self._free = list(range(num_running - 1, -1, -1))
        self._free_snapshots = list(range(num_running + num_snapshots - 1, num_running - 1, -1))
        self._snapshots: OrderedDict[Hashable, int] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for tensors in self._layers.values() for t in tensors)

    def layer(self, layer: int) -> tuple[Tensor, ...]:
        """Return the states `[num_slots, *shape]` of a layer."""
        return self._layers[layer]

    def allocate(self) -> int:
        """Return a slot of zeros, the state before the first token.

        Raises InternalError if none is free.
        """
        if not self._free:
            raise InternalError(f"all {self._num_running} slots for recurrent states are taken")
        slot = self._free.pop()
        self.scrub(slot)
        return slot

    def scrub(self, slot: int) -> None:
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[slot] = 0

    def free(self, slot: int) -> None:
        """Free a sequence's slot. Raises InternalError if it is free already."""
        if slot in self._free or not 0 <= slot < self._num_running:
            raise InternalError(f"the slot {slot} of a recurrent state was freed twice")
        self._free.append(slot)

    def has(self, key: Hashable) -> bool:
        """Return True if there is a snapshot under `key`."""
        return key in self._snapshots

    def snapshot(self, slot: int, key: Hashable) -> Hashable | None:
        """Keep a copy of a sequence's state under `key`; return the key dropped for it, or None."""
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return None
        dropped = None
        if not self._free_snapshots:
            if not self._snapshots:
                return None
            dropped, place = self._snapshots.popitem(last=False)
            self._free_snapshots.append(place)
        self._snapshots[key] = target = self._free_snapshots.pop()
        self.copy([slot], [target])
        return dropped

    def restore(self, key: Hashable, slot: int) -> None:
        """Copy the snapshot under `key` into a sequence's slot."""
        self._snapshots.move_to_end(key)
        self.copy([self._snapshots[key]], [slot])

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states from slot to slot. No slot may be both source and target."""
        self._slots.copy(sources, targets)

    def check_integrity(self, held: list[int]) -> None:
        """Raise InternalError unless each slot is either free or held by exactly one sequence."""
        if sorted([*held, *self._free]) != list(range(self._num_running)):
            raise InternalError(f"slots of recurrent states leaked: {held} held, {self._free} free")
