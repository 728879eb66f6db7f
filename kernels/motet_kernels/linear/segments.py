"""Assign the rows of a step to the adapters of `lora.py`, in tiles of rows of one adapter.

Shapes: M rows, T tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.spans import upload

TILE, GPU_TILE = 4, 16  # rows that share the factors they read
FREE = -1  # the slot of a row without an adapter


@dataclass(frozen=True, slots=True)
class Segments:
    """Assign a step's rows to adapters.

    tiles_T3: slot, first place in `order_M`, and number of rows (0: this tile and those after it
        are not used), int32.
    order_M: the rows by slot, free ones last, int32.
    Both may be overwritten for another step of as many rows.
    """

    tiles_T3: Tensor
    order_M: Tensor

    @classmethod
    def of(
        cls, slots_M: Sequence[int] | np.ndarray, device: torch.device | str = "cpu"
    ) -> Segments:
        """Build segments from each row's slot; FREE is none.

        There are as many tiles as rows on the CPU, as many as are used on a GPU.
        """
        slots = np.asarray(slots_M, dtype=np.int64)
        where = torch.device(device)
        on_gpu = gpu.is_gpu(where)
        order = np.argsort(np.where(slots < 0, np.iinfo(np.int64).max, slots), kind="stable")
        tiles = _tiles(slots[order], GPU_TILE if on_gpu else TILE)
        room = len(tiles) if on_gpu else len(slots)
        padded = np.zeros((room, 3), dtype=np.int32)
        padded[: len(tiles)] = tiles
        found = torch.from_numpy(padded), torch.from_numpy(order.astype(np.int32))
        return cls(*(upload(part, where) for part in found))

    def write(self, other: Segments) -> None:
        """Copy `other`, of as many rows, into this instance's tensors, at the same addresses."""
        self.tiles_T3.copy_(other.tiles_T3)
        self.order_M.copy_(other.order_M)


def _tiles(sorted_M: np.ndarray, size: int) -> np.ndarray:
    """Return `[T, 3]`: slot, first place, number of rows."""
    used = sorted_M[sorted_M >= 0]
    starts = (
        np.flatnonzero(np.r_[True, used[1:] != used[:-1]])
        if len(used)
        else np.zeros(0, dtype=np.int64)
    )
    ends = np.r_[starts[1:], len(used)] if len(used) else starts
    found = [
        (used[start], first, min(size, end - first))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        for first in range(start, end, size)
    ]
    return np.array(found, dtype=np.int32).reshape(-1, 3)
