"""Compute attention over a paged cache: decode rows and prefill chunks in one launch.

A program takes a tile of lines, that is of queries times the heads that share a key (packed as in
FlashInfer, Ye et al. 2025, arXiv 2501.01005), of one row and key head. The tile of a long row
iterates over all of its keys. The tiles of short rows, such as single queries, are too few to keep
a GPU busy, so their keys are cut at multiples of `SEGMENT` positions (Flash-Decoding, Dao et al.
2023); a second launch merges the segments' results, in the order of positions. How a row is cut
depends on that row alone, so its result is bit-identical whatever other rows are in the batch.

A needed table entry that is not a valid block makes the row's results NaN: raising an error would
require to synchronize with the device.

Shapes: as `motet_kernels.attention.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
from torch import Tensor

from motet_kernels.attention.kv_format import is_part, row_size, value_dim_of
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.gpu.attention.online_softmax import (
    ANY,
    DimParts,
    factors,
    multiplies_wide,
    size_for,
    sizes,
)
from motet_kernels.gpu.attention.paged_tiles import attend_tiles, merge_segments
from motet_kernels.gpu.codes import pages
from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample
from motet_kernels.spans import Tiles

SEGMENT = 512  # keys of a segment
_CHUNK = 16  # segments that are merged at a time

_SIZES = sizes(
    attend_tiles,
    (64, 64, [(4, 3, 64), (4, 2, 32)]),
    (128, 128, [(8, 2, 32)]),  # with 3 stages a step of only decode rows spills on sm_80
    (256, 64, [(8, 2, 32)]),
    (ANY, 16, [(8, 2, 32)]),
)
# Codes are widened in registers; larger tiles would not have enough of them.
_CODED_SIZES = sizes(
    attend_tiles,
    (64, 64, [(8, 2, 64), (4, 2, 32)]),
    (128, 64, [(8, 2, 64), (8, 2, 32)]),
    (256, 32, [(8, 2, 32)]),
    (ANY, 16, [(8, 2, 32)]),
)
# For float32, which matrix units do not multiply.
_WIDE_SIZES = sizes(attend_tiles, (64, 32, [(4, 2, 32)]), (ANY, 16, [(8, 2, 16)]))
_MERGE = GpuKernel(merge_segments, Config(warps=4), Config(warps=2))


def paged_attention(
    query_NHD: Tensor,
    key_PKSD: Tensor,
    value_PKSV: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute `motet_kernels.attention.paged_attention.paged_attention` with Triton."""
    (num_tokens, num_heads, dim), (num_blocks, kv_heads, slots, _) = query_NHD.shape, key_PKSD.shape
    value_dim, group = value_dim_of(value_PKSV, key_PKSD), num_heads // kv_heads
    keys, key_strides, codes = pages("key_PKSD", key_PKSD)
    part = is_part(value_PKSV, key_PKSD)
    values, value_strides, _ = pages("value_PKSV", key_PKSD if part else value_PKSV)
    key_parts, wide = DimParts.of(dim), multiplies_wide(query_NHD, *([] if codes else [key_PKSD]))
    shared = part and value_dim <= key_parts.main
    value_parts = DimParts(key_parts.main, 0) if shared else DimParts.of(value_dim)
    size = size_for(dim, _WIDE_SIZES if wide else _CODED_SIZES if codes else _SIZES)
    short, long = min(max(16, triton.next_power_of_2(group)), size.lines), size.lines
    tiles = batch.spans.tiles(group, short, long)
    segments = _segments(batch.tables_BM.shape[1] * slots, window, tiles, group)
    out_NHV = query_NHD.new_empty(num_tokens, num_heads, value_dim)
    lines = tiles.num_short * kv_heads * segments * short if segments > 1 else 0
    parts, sums = (
        query_NHD.new_empty(lines * size, dtype=torch.float32) for size in (value_dim, 2)
    )
    sinks = None if sinks_H is None else sinks_H.to(torch.float32).contiguous()
    what = {
        "G": group,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "SINKS": sinks is not None,
        "SLOTS": slots,
        "VALUE_DIM": value_dim,
        "SPLIT": SEGMENT,
    }
    size.kernel(
        (tiles.num_long + tiles.num_short * segments, kv_heads),
        *(
            query_NHD,
            keys,
            values,
            out_NHV,
            parts,
            sums,
            tiles.tiles_T4,
            batch.tables_BM,
            batch.lengths_B,
        ),
        *(sinks, *query_NHD.stride()[:2], *key_strides, *value_strides),
        *(batch.tables_BM.stride(0), batch.tables_BM.shape[1], num_blocks),
        *(tiles.num_long, segments, window or 0, *factors(scale, softcap)),
        SHORT=short if tiles.num_short else 0,
        LONG=long if tiles.num_long else 0,
        SOFTCAP=softcap is not None,
        SHARED=shared,
        WIDE=wide,
        CODES=codes,
        BEFORE_SCALE=dim if part else value_dim,
        DIM=dim,
        D=key_parts.main,
        E=key_parts.tail,
        V=value_parts.main,
        U=value_parts.tail,
        **what,
    )
    if segments > 1:
        _MERGE(
            (tiles.num_short, tiles.short_lines, kv_heads),
            *(
                out_NHV,
                parts,
                sums,
                tiles.tiles_T4,
                batch.lengths_B,
                sinks,
                batch.tables_BM.shape[1],
            ),
            *(tiles.num_long, segments, window or 0),
            SHORT=short,
            BLOCK=triton.next_power_of_2(value_dim),
            CHUNK=_CHUNK,
            **what,
        )
    return out_NHV


def _segments(limit: int, window: int | None, tiles: Tiles, group: int) -> int:
    """Return the most segments that a short tile touches, with tables of up to `limit` keys."""
    most = -(-limit // SEGMENT)
    if window is not None:
        mask = window + tiles.short_lines // group + 1
        most = min(most, -(-mask // SEGMENT) + 1)
    return max(most, 1)


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler.

    Each is (label, heads, key heads, slots, dims, types, queries, options).
    """
    plain = {"causal": True, "window": None, "softcap": None, "sinks_H": None}
    bent = plain | {"window": 1024, "softcap": 50.0}
    sinks = plain | {"window": 128, "sinks_H": torch.zeros(64)}
    cross = plain | {"causal": False}
    bf16, fp16, fp32 = [(dtype, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    bf16_int8, bf16_float8 = (torch.bfloat16, torch.int8), (torch.bfloat16, torch.float8_e4m3fn)
    for label, heads, kv_heads, slots, dims, types, queries, options in (
        ("decode, 32 heads on 8, dim 128", 32, 8, 16, (128, 128), bf16, [1, 1], plain),
        (
            "decode and prefill, 32 heads on 8, dim 128",
            32,
            8,
            16,
            (128, 128),
            bf16,
            [1, 512],
            plain,
        ),
        ("decode and prefill, 32 heads on 32, dim 96", 32, 32, 16, (96, 96), bf16, [1, 512], plain),
        ("window, cap, 8 heads on 4, dim 256", 8, 4, 16, (256, 256), bf16, [1, 512], bent),
        ("window, sinks, 64 heads on 8, dim 64", 64, 8, 16, (64, 64), fp16, [1, 512], sinks),
        ("latent, 128 heads on 1, dims 576 and 512", 128, 1, 16, (576, 512), bf16, [1, 512], plain),
        ("cross, 20 heads, dim 64", 20, 20, 1500, (64, 64), fp16, [1, 4], cross),
        ("decode and prefill, 16 heads on 8, dim 64", 16, 8, 16, (64, 64), fp32, [1, 512], plain),
        ("decode, 32 heads on 8, dim 128", 32, 8, 16, (128, 128), bf16_int8, [1, 1], plain),
        ("decode, 32 heads on 8, dim 128", 32, 8, 16, (128, 128), bf16_float8, [1, 1], plain),
        (
            "decode and prefill, 32 heads on 8, dim 128",
            32,
            8,
            16,
            (128, 128),
            bf16_int8,
            [1, 512],
            plain,
        ),
        (
            "decode and prefill, 32 heads on 8, dim 128",
            32,
            8,
            16,
            (128, 128),
            bf16_float8,
            [1, 512],
            plain,
        ),
        ("window, cap, 8 heads on 4, dim 256", 8, 4, 16, (256, 256), bf16_float8, [1, 512], bent),
        (
            "window, sinks, 64 heads on 8, dim 64",
            64,
            8,
            16,
            (64, 64),
            (torch.float16, torch.int8),
            [1, 512],
            sinks,
        ),
        (
            "latent, 128 heads on 1, dims 576 and 512",
            128,
            1,
            16,
            (576, 512),
            bf16_float8,
            [1, 512],
            plain,
        ),
    ):
        (dtype, cache), shared = types, dims[0] != dims[1]
        key = torch.zeros(9, kv_heads, slots, row_size(dims[0], cache), dtype=cache)
        value = key[..., : dims[1]] if shared else torch.zeros_like(key)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        batch = PagedBatch(
            torch.zeros(len(queries), -(-SEGMENT // slots), dtype=torch.int32),
            starts,
            starts.diff().int(),
        )
        query = torch.zeros(sum(queries), heads, dims[0], dtype=dtype)
        name = f"{label}, {dtype}{'' if cache == dtype else f' on {cache}'}"
        call = partial(paged_attention, query, key, value, batch, scale=0.1, **options)
        yield LaunchSample(name, call, mma=dtype != torch.float32)
