"""Attend for sequences that are longer than the pool, one layer at a time.

For each layer, the spilled blocks (`motet_llm.cache.spill`) and those in the pool are copied side
by side into one memory, and the kernel that attends to the pool attends to that. It sees the same
keys in the same order, so results equal those of a pool that holds everything, bit for bit; each
step only waits until all spilled blocks are copied once.

FlexGen (Sheng et al. 2023) does the same with layers; here only the sequences that need it do.

Shapes: N packed tokens, H heads, P blocks, X bytes of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.runtime.device import upload_all
from motet_llm.cache.kv_cache import CPU, KvCache, zeros
from motet_llm.cache.spill import Spilled

# Queries, keys and values by block, and the block tables of the rows.
Attend = Callable[[Tensor, Tensor, Tensor, PagedBatch], Tensor]


class Staging:
    """Hold memory for one layer of the longest sequence."""

    def __init__(self, nbytes: int, device: torch.device = CPU):
        self._bytes = zeros(1, nbytes, device)[0]

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    def rows(self, num_blocks: int, row_bytes: int) -> Tensor:
        """Return memory for `num_blocks` blocks of a layer, `[P, X]`."""
        return self._bytes[: num_blocks * row_bytes].view(num_blocks, row_bytes)

    def batch(self, num_blocks: int, span: tuple[int, int]) -> PagedBatch:
        """Return the batch of the one row staged here; the tokens of `span` are its queries."""
        start, stop = span
        table_1P = torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0)
        counts = [
            torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, stop - start], [stop])
        ]
        batch = PagedBatch(table_1P, *counts)
        return batch if self.device.type == "cpu" else batch.to(self.device)


@dataclass(slots=True)
class _LongRow:
    """Represent one row of a sequence that is longer than the pool.

    places: its slice of the packed tokens.
    resident_P: its blocks in the pool, those after the spilled ones.
    """

    places: slice
    spilled: Spilled
    resident_P: Tensor
    batch: PagedBatch

    @property
    def num_blocks(self) -> int:
        return self.spilled.num_blocks + len(self.resident_P)


class LongRows:
    """Attend in a step with long rows: each of them alone, and the `others` together."""

    def __init__(
        self,
        staging: Staging,
        spilled: Sequence[Spilled | None],
        tables: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
        block_size: int,
    ):
        """Divide the rows of a step into long ones and others.

        spilled: for each row what is spilled of it, or None.
        tables: all blocks of each row.
        spans: tokens that each row computes.
        """
        self._staging = staging
        self.others: list[int] = []
        self._long: list[_LongRow] = []
        places, stop = [], 0
        for row, (out, table, span) in enumerate(zip(spilled, tables, spans, strict=True)):
            start, stop = stop, stop + span[1] - span[0]
            if out is None:
                self.others.append(row)
                places.append(np.arange(start, stop))
                continue
            num_blocks = -(-span[1] // block_size)
            resident = np.array(table[out.num_blocks : num_blocks], dtype=np.int64)
            (resident_P,) = upload_all([resident], staging.device)
            self._long.append(
                _LongRow(slice(start, stop), out, resident_P, staging.batch(num_blocks, span))
            )
        self._places_N = upload_all([np.concatenate(places)], staging.device)[0] if places else None

    def attend(
        self, kv: KvCache, layer: int, query_NHD: Tensor, batch: PagedBatch, attend: Attend
    ) -> Tensor:
        """Return `attend`'s result for all rows, `[N, H, V]`. `batch`: `others`, in the pool."""
        parts: list[tuple[slice | Tensor, Tensor]] = []
        if self._places_N is not None:
            parts.append(
                (self._places_N, attend(query_NHD[self._places_N], *kv.layer(layer), batch))
            )
        for row in self._long:
            keys, values = self._stage(kv, layer, row)
            parts.append((row.places, attend(query_NHD[row.places], keys, values, row.batch)))
        out_NHV = parts[0][1].new_empty(len(query_NHD), *parts[0][1].shape[1:])
        for places, part in parts:
            out_NHV[places] = part
        return out_NHV

    def _stage(self, kv: KvCache, layer: int, row: _LongRow) -> tuple[Tensor, Tensor]:
        """Stage one layer's keys and values of a row.

        Blocks that cannot be read are left as they are: the row is lost then.
        """
        pool_PX = kv.rows(layer)
        staged_PX = self._staging.rows(row.num_blocks, pool_PX.shape[1])
        row.spilled.read(layer, staged_PX)
        torch.index_select(pool_PX, 0, row.resident_P, out=staged_PX[row.spilled.num_blocks :])
        return kv.views(layer, staged_PX)
