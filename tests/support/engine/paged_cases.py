"""Build packed rows over a paged cache, with their attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from motet_kernels.attention.kv_format import CODED, decode, encode
from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch

GARBAGE = 1 << 30


@dataclass
class Case:
    """Hold rows over a cache that is NaN outside them, with tables that are garbage where unused."""

    query_NHD: Tensor
    key_PKSD: Tensor
    value_PKSV: Tensor
    rows: list[tuple[int, int]]  # earlier keys, queries
    options: dict[str, Any]
    keys_B: list[Tensor]
    values_B: list[Tensor]
    tables: list[list[int]]

    def run(self, chosen: list[int] | None = None) -> Tensor:
        """Return the output `[N, H, V]` of some rows in the given order; of all by default."""
        chosen = list(range(len(self.rows))) if chosen is None else chosen
        query = torch.cat([self.queries(row) for row in chosen]) if chosen else self.query_NHD[:0]
        return self.attend(query, [(row, *self.rows[row]) for row in chosen])

    def attend(self, query_NHD: Tensor, pieces: list[tuple[int, int, int]]) -> Tensor:
        """Compute attention of packed pieces of rows: (row, keys before, queries) each."""
        starts = torch.tensor([0] + [queries for _, _, queries in pieces]).cumsum(0).int()
        lengths = torch.tensor(
            [earlier + queries for _, earlier, queries in pieces], dtype=torch.int32
        )
        tables = torch.full(
            (len(pieces), max(map(len, self.tables), default=0) + 2), -GARBAGE, dtype=torch.int32
        )
        for index, (row, earlier, queries) in enumerate(pieces):
            last = -(-(earlier + queries) // self.key_PKSD.shape[2])
            tables[index, :last] = torch.tensor(self.tables[row][:last])
        batch = PagedBatch(tables, starts, lengths)
        if not self.key_PKSD.is_cpu:
            batch = batch.to(self.key_PKSD.device)
        out = paged_attention(
            query_NHD.to(self.key_PKSD.device),
            self.key_PKSD,
            self.value_PKSV,
            batch,
            **self.options,
        )
        return out.cpu()

    def queries(self, row: int) -> Tensor:
        start = sum(queries for _, queries in self.rows[:row])
        return self.query_NHD[start : start + self.rows[row][1]]

    def expected(self) -> Tensor:
        outs = [self._expected(row) for row in range(len(self.rows))]
        return torch.cat(outs) if outs else self.query_NHD.new_zeros(0, *self.query_NHD.shape[1:])

    def _expected(self, row: int) -> Tensor:
        (earlier, queries), group = (
            self.rows[row],
            self.query_NHD.shape[1] // self.key_PKSD.shape[1],
        )
        keys, values = (
            x[row].double().repeat_interleave(group, 0) for x in (self.keys_B, self.values_B)
        )
        scores = (
            self.queries(row).double().transpose(0, 1)
            @ keys.transpose(1, 2)
            * self.options["scale"]
        )
        if softcap := self.options["softcap"]:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(earlier, earlier + queries)
        at = at if self.options["causal"] else torch.full_like(at, earlier + queries - 1)
        ago = at[:, None] - torch.arange(earlier + queries)
        scores = scores.masked_fill(
            (ago < 0) | (ago >= (self.options["window"] or GARBAGE)), -math.inf
        )
        if (sinks := self.options["sinks_H"]) is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, queries, 1)], -1)
        return (scores.softmax(-1)[..., : earlier + queries] @ values).transpose(0, 1)


def make(
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    slots: int = 16,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype = torch.float32,
    shared: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Case:
    torch.manual_seed(seed)
    (num_heads, kv_heads), (dim, value_dim), window = heads, dims, options.get("window")
    # Queries and caches as model code has them: parts of something larger.
    query_NHD = (
        torch.randn(num_heads, sum(queries for _, queries in rows), 2 * dim)
        .transpose(0, 1)[..., :dim]
        .to(dtype)
    )
    needed = [-(-(earlier + queries) // slots) for earlier, queries in rows]
    pool = torch.randperm(sum(needed) + 3).tolist()
    key_PKSD = _all_nan(len(pool), kv_heads, slots, dim, cache=cache, device=device)
    value_PKSV = key_PKSD[..., :value_dim]
    if not shared:
        value_PKSV = _all_nan(len(pool), kv_heads, slots, value_dim, cache=cache, device=device)
    tables, keys_B, values_B = [], [], []
    for (earlier, queries), blocks in zip(rows, needed, strict=True):
        table = [pool.pop() for _ in range(blocks)]
        keys, values = (
            _held(torch.randn(kv_heads, earlier + queries, d), cache) for d in (dim, value_dim)
        )
        first = 0 if window is None else max(0, earlier - window + 1)
        for t in range(first // slots * slots, earlier + queries):
            _put(key_PKSD, table[t // slots], t % slots, keys[:, t])
            if not shared:
                _put(value_PKSV, table[t // slots], t % slots, values[:, t])
        tables.append([GARBAGE] * (first // slots) + table[first // slots :])
        keys, values = (decode(held) if cache in CODED else held for held in (keys, values))
        keys_B.append(keys)
        values_B.append(keys[..., :value_dim] if shared else values)
    options = {
        "scale": dim**-0.5,
        "causal": True,
        "window": None,
        "softcap": None,
        "sinks_H": None,
    } | options
    return Case(query_NHD, key_PKSD, value_PKSV, rows, options, keys_B, values_B, tables)


def _held(rows: Tensor, cache: torch.dtype) -> Tensor:
    """Return rows as a cache of this type stores them."""
    return encode(rows, cache) if cache in CODED else rows.to(cache)


def _all_nan(*shape: int, cache: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a NaN cache that is a slice of a larger tensor."""
    rows = _held(torch.full(shape, math.nan), cache).to(device)
    return torch.cat((rows.view(torch.uint8), rows.view(torch.uint8)), -1).view(cache)[
        ..., : rows.shape[-1]
    ]


def _put(cache_PKSD: Tensor, block: int, place: int, rows_KD: Tensor) -> None:
    """Write as bytes, since torch does not index-assign float8."""
    cache_PKSD.view(torch.uint8)[block, :, place] = rows_KD.view(torch.uint8).to(cache_PKSD.device)
