"""Hold the keys and values of running windows: one row per window, rows without gaps.

B rows · H heads · L tokens · S encoder frames · D head size. Every step reads views of the first
rows, without gathering; when a row ends, the last one is copied over it, which is rare and cheap
compared to the steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_kernels.runtime.device import upload_all
from motet_shared.errors import InternalError


class Slots:
    """Allocate rows of keys and values.

    Grows by doubling up to `max_rows`, and in encoder frames up to the longest audio so far.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_size: int,
        length: int,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.length = length  # capacity of a row, in tokens
        self.max_rows = max_rows
        self.filled: list[int] = []  # tokens in each row
        self.frames: list[int] = []  # encoder frames of each row
        self._shape = (layers, heads, head_size)
        self._dtype, self._device = dtype, device
        self.tapes: dict[
            int, Any
        ] = {}  # recorded steps over these tensors, by number of rows; invalid once they move
        self.self_kv = self._empty(0, length)  # [layers, 2, rows, H, L, D]
        self.cross_kv = self._empty(0, 0)  # [layers, 2, rows, H, S, D]

    def _empty(self, rows: int, length: int) -> Tensor:
        layers, heads, head_size = self._shape
        return torch.zeros(
            layers, 2, rows, heads, length, head_size, dtype=self._dtype, device=self._device
        )

    @property
    def rows(self) -> int:
        """Return the number of rows in use."""
        return len(self.filled)

    @property
    def free(self) -> int:
        """Return the number of rows that are left."""
        return self.max_rows - self.rows

    @torch.inference_mode()
    def add(self, frames: int) -> int:
        """Append a row with room for `frames` encoder frames; return its number.

        Raises InternalError if all rows are taken.
        """
        if not self.free:
            raise InternalError(f"all {self.max_rows} rows are in use")
        row = self.rows
        capacity, longest = self.self_kv.shape[2], self.cross_kv.shape[4]
        if row == capacity or frames > longest:
            self._grow(
                min(max(2 * capacity, 1), self.max_rows) if row == capacity else capacity,
                max(frames, longest),
            )
        self.filled.append(0)
        self.frames.append(frames)
        return row

    def _grow(self, capacity: int, longest: int) -> None:
        self_kv, cross_kv = self.self_kv, self.cross_kv
        self.tapes.clear()
        if capacity > self_kv.shape[2]:
            self.self_kv = self._empty(capacity, self.length)
            self.self_kv[:, :, : self_kv.shape[2]] = self_kv
        self.cross_kv = self._empty(capacity, longest)
        self.cross_kv[:, :, : cross_kv.shape[2], :, : cross_kv.shape[4]] = cross_kv

    @torch.inference_mode()
    def remove(self, row: int) -> None:
        """Free a row. The last row takes its place and its number."""
        last = self.rows - 1
        if row != last:
            used, frames = self.filled[last], self.frames[last]
            self.self_kv[:, :, row, :, :used] = self.self_kv[:, :, last, :, :used]
            self.cross_kv[:, :, row, :, :frames] = self.cross_kv[:, :, last, :, :frames]
            self.filled[row], self.frames[row] = used, frames
        self.filled.pop()
        self.frames.pop()

    def clear(self) -> None:
        """Free and zero all rows."""
        for row in range(self.rows):
            self.scrub(row)
        self.filled, self.frames = [], []

    @torch.inference_mode()
    def scrub(self, row: int) -> None:
        """Zero a row: NaN left in it would spread to its next window, since 0 * NaN is NaN."""
        self.self_kv[:, :, row] = 0
        self.cross_kv[:, :, row] = 0

    def self_mask(self) -> tuple[int, Tensor | None]:
        """Return the token count of the longest row after a step and the rows' mask [B, 1, 1, L].

        The mask is None if all rows have equally many tokens.
        """
        longest = max(self.filled) + 1
        if min(self.filled) + 1 == longest:
            return longest, None
        return longest, self._mask([filled + 1 for filled in self.filled], longest)

    def cross_mask(self, first: int, last: int) -> tuple[int, Tensor | None]:
        """Return the most encoder frames in rows `first` to `last` (exclusive) and their mask.

        The mask is [B, 1, 1, S], or None if all rows have equally many frames.
        """
        frames = self.frames[first:last]
        longest = max(frames)
        if min(frames) == longest:
            return longest, None
        return longest, self._mask(frames, longest)

    def _mask(self, counts: list[int], longest: int) -> Tensor:
        """Return [B, 1, 1, longest], True for the first `counts[row]` entries of each row."""
        (counts_B,) = upload_all([np.array(counts)], self._device)
        return (torch.arange(longest, device=self._device) < counts_B[:, None])[:, None, None]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all keys and values."""
        return self.self_kv.nbytes + self.cross_kv.nbytes
