"""Compute attention of packed queries over a paged KV cache, causal or, for encoders, to all keys.

The rows of a step are packed one after the other into N tokens: decode rows with one query each,
prefill chunks with many, in any mix. Query i of a row with q queries and T keys has position T - q
+ i and, if causal, attends to the keys up to that position.

Shapes: N packed tokens, B rows, M table entries per row, H heads, K key/value heads (G = H / K
share one), P blocks, S slots per block, D key dim, V value dim, Q queries of a row, T its keys.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_kernels import gpu
from motet_kernels.attention.kv_format import CODED, TYPES, decode, dim_of, is_part, value_dim_of
from motet_kernels.attention.paged_batch import PagedBatch as PagedBatch
from motet_kernels.runtime.arguments import check_device, check_floats, check_pages, is_cpu
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.native import Kernel

_ATTEND = Kernel("motet_paged_attention", "p")
# Layout of `Arguments` in csrc/attention.cpp.
_PACK = struct.Struct("29q2d").pack


def paged_attention(
    query_NHD: Tensor,
    key_PKSD: Tensor,
    value_PKSV: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the attention of every query to the keys of its row, `[N, H, V]` in the queries' type.

    If `causal`, a query attends to keys up to its own position; otherwise to all keys of its row.
    Queries are float32 or bfloat16, and so is the cache, in a type of its own; the cache may also
    be of 8 bits (`kv.py`). Sums are float32. A `window` of w limits attention to the token itself
    and the w - 1 before it. `softcap` c makes a score c·tanh(score / c). `sinks_H` are logits, one
    per head, that take part in the softmax and contribute no value. The value cache may be a view
    of the key cache.

    On the CPU, a query's result is bit-identical for the same position and keys: it depends neither
    on the other rows nor on how the prompt was chunked. Raises `KernelError` on arguments that do
    not fit each other, and on a table in which a needed entry is not a valid block.
    """
    _check(query_NHD, key_PKSD, value_PKSV, batch, causal, window, softcap, sinks_H)
    by_triton = gpu.takes(query_NHD)
    attend = _ATTEND.native() if is_cpu(query_NHD) and not by_triton else None
    if attend is None:
        return _where_not_native(by_triton)(
            query_NHD,
            key_PKSD,
            value_PKSV,
            batch,
            scale=scale,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
        )
    (num_tokens, heads, dim), (blocks, kv_heads, slots, _) = query_NHD.shape, value_PKSV.shape
    value_dim = value_dim_of(value_PKSV, key_PKSD)
    out_NHV = query_NHD.new_empty(num_tokens, heads, value_dim)
    sinks = None if sinks_H is None else sinks_H.to(torch.float32).contiguous()
    tables, starts, lengths = batch.tables_BM, batch.starts, batch.lengths_B
    bad = attend(
        _PACK(
            query_NHD.data_ptr(),
            query_NHD.dtype == torch.bfloat16,
            *query_NHD.stride()[:2],
            key_PKSD.data_ptr(),
            TYPES[key_PKSD.dtype],
            *key_PKSD.stride()[:3],
            value_PKSV.data_ptr(),
            *value_PKSV.stride()[:3],
            tables.data_ptr(),
            *(tables.stride(0), tables.shape[1]),
            *(starts.data_ptr(), lengths.data_ptr()),
            *(len(lengths), heads, kv_heads, blocks, slots, dim, value_dim, window or 0, causal),
            0 if sinks is None else sinks.data_ptr(),
            out_NHV.data_ptr(),
            *(scale, softcap or 0.0),
        )
    )
    if bad:
        raise _bad_table(bad - 1, batch, blocks, slots)
    return out_NHV


def _where_not_native(by_triton: bool) -> Callable[..., Tensor]:
    """Return Triton's kernel or the torch twin."""
    if not by_triton:
        return attention_torch
    from motet_kernels.gpu.attention import paged_attention as kernels

    return kernels.paged_attention


def attention_torch(
    query_NHD: Tensor,
    key_PKSD: Tensor,
    value_PKSV: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute `paged_attention` in torch: its twin.

    Single-query rows with the same number of blocks are batched; other rows are computed one at a
    time.
    """
    out_NHV = query_NHD.new_empty(*query_NHD.shape[:2], value_dim_of(value_PKSV, key_PKSD))
    starts, num_blocks = batch.starts.tolist(), key_PKSD.shape[0]
    alike: dict[tuple[int, ...], list[_Row]] = {}
    for index, length in enumerate(batch.lengths_B.tolist()):
        row = _Row.of(
            batch,
            index,
            starts[index],
            starts[index + 1] - starts[index],
            length,
            key_PKSD.shape[2],
            window,
        )
        if row.queries and not (
            len(row.table) and 0 <= int(row.table.min()) <= int(row.table.max()) < num_blocks
        ):
            raise _bad_table(index, batch, num_blocks, key_PKSD.shape[2])
        kind = (len(row.table),) if row.queries == 1 else (len(row.table), index)
        if row.queries:
            alike.setdefault(kind, []).append(row)
    for rows in alike.values():
        tokens = torch.cat(
            [
                torch.arange(row.start, row.start + row.queries, device=query_NHD.device)
                for row in rows
            ]
        )
        query_BQHD = query_NHD[tokens].float().unflatten(0, (len(rows), -1)) * scale
        out_BQHV = _attend_rows(
            query_BQHD, key_PKSD, value_PKSV, rows, causal, window, softcap, sinks_H
        )
        out_NHV[tokens] = out_BQHV.flatten(0, 1).to(out_NHV.dtype)
    return out_NHV


@dataclass(frozen=True, slots=True)
class _Row:
    """Locate packed tokens of a row, and the blocks that they attend to from key `first_key` on."""

    start: int
    queries: int
    length: int
    first_key: int
    table: Tensor

    @classmethod
    def of(
        cls,
        batch: PagedBatch,
        index: int,
        start: int,
        queries: int,
        length: int,
        slots: int,
        window: int | None,
    ) -> _Row:
        first = 0 if window is None else max(0, length - queries - window + 1) // slots
        stop = -(-length // slots)
        table = (
            batch.tables_BM[index, first:stop]
            if stop <= batch.tables_BM.shape[1]
            else batch.tables_BM[index, :0]
        )
        return cls(start, queries, length, first * slots, table.long())


def _attend_rows(
    query_BQHD: Tensor,
    key_PKSD: Tensor,
    value_PKSV: Tensor,
    rows: list[_Row],
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Return the attention of rows with equally many queries and blocks, `[B, Q, H, V]`.

    Keys and values that no query attends to are zeroed, because they may be NaN.
    """
    tables_BM = torch.stack([row.table for row in rows])
    key_BKTD, value_BKTV = (
        part.transpose(1, 2).flatten(2, 3) for part in _widened(key_PKSD, value_PKSV, tables_BM)
    )
    (_, queries, heads, _), (_, kv_heads, keys, _) = query_BQHD.shape, key_BKTD.shape
    device = query_BQHD.device
    last_B = torch.tensor([row.length - row.first_key - queries for row in rows], device=device)
    steps_Q = (
        torch.arange(queries, device=device)
        if causal
        else torch.full((queries,), queries - 1, device=device)
    )
    ago_BQT = (last_B[:, None] + steps_Q)[:, :, None] - torch.arange(keys, device=device)
    hidden_BQT = ago_BQT < 0 if window is None else (ago_BQT < 0) | (ago_BQT >= window)
    unseen_B1T1 = hidden_BQT.all(1)[:, None, :, None]
    key_BKTD, value_BKTV = (
        key_BKTD.masked_fill(unseen_B1T1, 0),
        value_BKTV.masked_fill(unseen_B1T1, 0),
    )
    query_BKGQD = query_BQHD.transpose(1, 2).unflatten(1, (kv_heads, -1))
    scores = (query_BKGQD @ key_BKTD.transpose(-1, -2)[:, :, None]).flatten(1, 2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(hidden_BQT[:, None], -torch.inf)
    if sinks_H is not None:
        scores = torch.cat(
            [scores, sinks_H.float().view(1, heads, 1, 1).expand(len(rows), heads, queries, 1)], -1
        )
    weights = torch.softmax(scores, -1)[..., :keys].unflatten(1, (kv_heads, -1))
    output: Tensor = (weights @ value_BKTV[:, :, None]).flatten(1, 2).transpose(1, 2)
    return output


def _widened(key_PKSD: Tensor, value_PKSV: Tensor, tables_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks of keys and values as float32 `[B, M, K, S, D]` and `[B, M, K, S, V]`."""
    if key_PKSD.dtype not in CODED:
        return key_PKSD[tables_BM].float(), value_PKSV[tables_BM].float()
    bytes_of_keys = key_PKSD.view(torch.uint8)[tables_BM]
    key = decode(bytes_of_keys.view(key_PKSD.dtype))
    if is_part(value_PKSV, key_PKSD):
        return key, key[..., : value_PKSV.shape[3]]
    return key, decode(value_PKSV.view(torch.uint8)[tables_BM].view(value_PKSV.dtype))


def _check(
    query_NHD: Tensor,
    key_PKSD: Tensor,
    value_PKSV: Tensor,
    batch: PagedBatch,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> None:
    check_floats("query_NHD", query_NHD, 3)
    check_pages("key_PKSD", key_PKSD)
    check_pages("value_PKSV", value_PKSV)
    (num_tokens, heads, dim), shape = query_NHD.shape, key_PKSD.shape
    if num_tokens != batch.num_tokens:
        raise KernelError(f"query_NHD: {num_tokens} tokens must be the batch's {batch.num_tokens}")
    if dim != dim_of(key_PKSD):
        raise KernelError(f"query_NHD: dim {dim} must be the keys' {dim_of(key_PKSD)}")
    if shape[1] < 1 or heads % shape[1]:
        raise KernelError(f"query_NHD: {heads} heads must be a multiple of the cache's {shape[1]}")
    if value_PKSV.shape[:3] != shape[:3]:
        raise KernelError(
            f"value_PKSV: shape {list(value_PKSV.shape)} must begin as the keys' {list(shape)}"
        )
    if value_PKSV.dtype != key_PKSD.dtype:
        raise KernelError(f"value_PKSV: {value_PKSV.dtype} must be the keys' {key_PKSD.dtype}")
    if window is not None and window < 1:
        raise KernelError(f"window: {window} must be at least 1, or None")
    if window is not None and not causal:
        raise KernelError(
            f"window: {window} must be None where every query sees all keys (causal=False)"
        )
    if softcap is not None and not softcap > 0:
        raise KernelError(f"softcap: {softcap} must be above 0, or None")
    if sinks_H is not None and sinks_H.shape != (heads,):
        raise KernelError(f"sinks_H: shape {list(sinks_H.shape)} must be [{heads}], one per head")
    for name, tensor in (
        ("query_NHD", query_NHD),
        ("value_PKSV", value_PKSV),
        ("tables_BM", batch.tables_BM),
    ):
        check_device(name, tensor, "key_PKSD", key_PKSD)


def _bad_table(row: int, batch: PagedBatch, blocks: int, slots: int) -> KernelError:
    length = int(batch.lengths_B[row])
    return KernelError(
        f"tables_BM[{row}]: {batch.tables_BM[row].tolist()} must hold {-(-length // slots)} blocks from 0 to"
        f" {blocks - 1}, for {length} keys in blocks of {slots}"
    )
