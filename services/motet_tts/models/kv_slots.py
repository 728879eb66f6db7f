"""Store keys and values of running sequences: slots 0 to n-1 are the n rows of a batch.

transformers' attention layers call `update` on whatever is passed as `past_key_values`, so a part
of the slots can act as their cache. A model that computes several rows for a sequence (with and
without its text, for guidance) has them next to each other; they share the slot as further heads.

Shapes: S slots, B rows, H key-value heads, T positions, Q new positions, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from motet_kernels.spans import upload

_GROWTH = 128  # positions by which the slots grow, at least


class KvSlots:
    """Allocate slots; grows with the number of sequences and with the longest of them.

    device: where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lengths: list[int] = []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # [S, H, T, D] each
        self.heads: dict[int, int] = {}  # of each layer, in one row of the model

    def add(self) -> int:
        """Add a slot after the last one; return its number."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    @torch.inference_mode()  # the tensors that are moved were written in inference mode
    def remove(self, slot: int) -> None:
        """Free a slot. The last sequence moves into it, unless it was the last."""
        last = len(self.lengths) - 1
        if slot != last:
            length = self.lengths[last]
            for pair in self._layers.values():
                for kept_SHTD in pair:
                    kept_SHTD[slot, :, :length] = kept_SHTD[last, :, :length]
            self.lengths[slot] = length
        self.lengths.pop()
        if not self.lengths:
            self._layers.clear()

    @torch.inference_mode()
    def scrub(self, slot: int) -> None:
        """Write zeros to a slot: NaN in masked positions of its next sequence would spread."""
        for pair in self._layers.values():
            for kept_SHTD in pair:
                kept_SHTD[slot : slot + 1] = 0

    def one(self, slot: int, count: int) -> SlotBatch:
        """Return one slot as a batch of one row that gets `count` new positions."""
        return SlotBatch(self, slot, [self.lengths[slot]], count)

    def many(self, begin: int, rows: int, count: int = 1) -> SlotBatch:
        """Return `rows` slots from `begin` on as a batch with `count` new positions each."""
        return SlotBatch(self, begin, self.lengths[begin : begin + rows], count)

    def stored(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer that has been written."""
        return self._layers[index]

    def layer(self, index: int, like_BHQD: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, with room for `length` positions in every slot."""
        pair = self._layers.get(index)
        slots = len(self.lengths)
        if pair is None or pair[0].shape[0] < slots or pair[0].shape[2] < length:
            rows, positions = (0, 0) if pair is None else (pair[0].shape[0], pair[0].shape[2])
            if rows < slots:
                rows = max(slots, min(2 * rows, slots + 8))
            capacity = (rows, -(-max(length, positions) // _GROWTH) * _GROWTH)
            pair = self._layers[index] = (
                _grown(pair, 0, like_BHQD, capacity),
                _grown(pair, 1, like_BHQD, capacity),
            )
        return pair


@dataclass(slots=True)
class SlotBatch:
    """Represent slots during one forward pass; call the model with its `mask` and `positions`.

    before: positions in each row before the pass.
    count: new positions of each row, Q.
    positions: `[B, Q]`.
    mask: `[B, 1, Q, T]`, True where a position may attend.
    """

    slots: KvSlots
    begin: int
    before: list[int]
    count: int
    positions: Tensor = field(init=False)
    mask: Tensor = field(init=False)
    _rows_B1: Tensor = field(init=False)
    _total: int = field(init=False)  # T

    def __post_init__(self) -> None:
        device = self.slots.device
        self._total = max(self.before) + self.count
        self.positions = upload(
            torch.tensor(self.before)[:, None] + torch.arange(self.count), device
        )
        self.mask = (torch.arange(self._total, device=device) <= self.positions[:, :, None])[
            :, None
        ]
        self._rows_B1 = torch.arange(self.begin, self.begin + len(self.before), device=device)[
            :, None
        ]

    @property
    def stored(self) -> Tensor:
        """Return a mask `[B, 1, 1, T]` of the positions that each row has, in any order."""
        device = self.slots.device
        lengths_B = upload(torch.tensor(self.before) + self.count, device)
        return (torch.arange(self._total, device=device) < lengths_B[:, None])[:, None, None]

    def update(
        self, keys_BHQD: Tensor, values_BHQD: Tensor, layer_idx: int, *_: object
    ) -> tuple[Tensor, Tensor]:
        """Store the new positions; return all, including those beyond a row's length."""
        rows, heads = len(self.before), keys_BHQD.shape[1]
        self.slots.heads[layer_idx] = heads
        keys_BHQD, values_BHQD = (
            each.unflatten(0, (rows, -1)).flatten(1, 2) for each in (keys_BHQD, values_BHQD)
        )
        keys_SHTD, values_SHTD = self.slots.layer(layer_idx, keys_BHQD, self._total)
        keys_SHTD[self._rows_B1, :, self.positions] = keys_BHQD.transpose(1, 2)
        values_SHTD[self._rows_B1, :, self.positions] = values_BHQD.transpose(1, 2)
        return self.read(layer_idx)

    def read(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer, including those beyond a row's length."""
        rows, heads = slice(self.begin, self.begin + len(self.before)), self.slots.heads[layer_idx]
        keys, values = (
            kept_SHTD[rows, :, : self._total].unflatten(1, (-1, heads)).flatten(0, 1)
            for kept_SHTD in self.slots.stored(layer_idx)
        )
        return keys, values

    def close(self) -> None:
        """Record the rows' new lengths after the forward pass."""
        for row, before in enumerate(self.before):
            self.slots.lengths[self.begin + row] = before + self.count


def _grown(
    pair: tuple[Tensor, Tensor] | None, which: int, like_BHQD: Tensor, capacity: tuple[int, int]
) -> Tensor:
    _, heads, _, dim = like_BHQD.shape
    # Zeros, not uninitialized memory: masked values must still be finite.
    grown = like_BHQD.new_zeros(capacity[0], heads, capacity[1], dim)
    if pair is not None:
        old = pair[which]
        grown[: old.shape[0], :, : old.shape[2]] = old
    return grown
