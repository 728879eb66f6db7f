"""Describe rows of packed tokens and partition them into tiles for GPU launches.

A line is a query of one of the G heads that share a key: line `l` of a row is head `l % G` of its
query `l // G`. A program computes a tile of lines. How a row is cut depends on that row alone, so
its result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from motet_kernels.runtime.errors import KernelError


@dataclass(frozen=True, slots=True)
class Tiles:
    """Hold the tiles of a launch, on its device.

    tiles_T4: int32 (row, its first token, its queries, the tile's first line). The `num_long` tiles
        of long rows come first, in reverse order, because the last tile of a causal row takes
        longest; then the `num_short` others, none of which has more than `short_lines` lines.
    """

    tiles_T4: Tensor
    num_long: int
    num_short: int
    short_lines: int


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Locate rows of packed tokens: row b has the tokens `bounds[b] : bounds[b + 1]`.

    Tensors that are computed with them are on `device`. Raises `KernelError` on bounds that do not
    begin with 0 or that decrease.
    """

    bounds: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _tiles: dict[tuple[int, int, int], Tiles] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.bounds or self.bounds[0] != 0:
            raise KernelError(
                f"starts[0]: {self.bounds[0] if self.bounds else 'nothing'} must be 0"
            )
        for row, (start, stop) in enumerate(pairwise(self.bounds)):
            if stop < start:
                raise KernelError(
                    f"starts[{row + 1}]: {stop} must be at least the start before it, {start}"
                )

    @classmethod
    def of(cls, lengths: Iterable[int], device: torch.device | None = None) -> Spans:
        """Build spans of rows with the given numbers of tokens."""
        return cls(tuple(accumulate(lengths, initial=0)), device or torch.device("cpu"))

    @property
    def num_tokens(self) -> int:
        """Return the number of packed tokens of all rows."""
        return self.bounds[-1]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return for each row its first token and the one after its last."""
        return list(pairwise(self.bounds))

    def tiles(self, group: int, short: int, long: int) -> Tiles:
        """Return the rows cut into tiles of lines, `group` lines per query; cached.

        Rows of up to `long` lines, or of one query, are short: they are cut into tiles of `short`
        lines, others of `long`. With `short` 0 every row is long. The copy to the device does not
        wait for it.
        """
        key = (group, short, long)
        if key not in self._tiles:
            self._tiles[key] = self._share_out(group, short, long)
        return self._tiles[key]

    def _share_out(self, group: int, short: int, long: int) -> Tiles:
        starts = np.asarray(self.bounds, dtype=np.int64)
        lines = np.diff(starts) * group
        is_short = lines <= (max(long, group) if short else -1)
        long_T4 = _cut(starts, lines, group, np.flatnonzero(~is_short), long)[::-1]
        short_T4 = _cut(starts, lines, group, np.flatnonzero(is_short), short or long)
        most = min(int(lines[is_short].max(initial=0)), short)
        both = np.concatenate([long_T4, short_T4]).astype(np.int32)
        return Tiles(upload(torch.from_numpy(both), self.device), len(long_T4), len(short_T4), most)


def _cut(
    starts: np.ndarray, lines: np.ndarray, group: int, rows: np.ndarray, size: int
) -> np.ndarray:
    """Return `[T, 4]`: (row, first token, queries, first line) of tiles of `size` lines."""
    counts = -(-lines[rows] // size)
    of = np.repeat(rows, counts)
    first = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    return np.stack([of, starts[of], lines[of] // group, first], axis=1)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`; the copy does not wait for pending GPU work."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )
