"""Compute attention within packed rows: to all tokens, to earlier tokens, or to nearby ones.

A program takes a tile of lines of one row and key head and iterates over the keys that they attend
to (`online_softmax.py`).

Shapes: as `motet_kernels.attention.full_attention`, and L lines of a tile, G heads that share a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.attention.online_softmax import (
    ANY,
    DimParts,
    attend_keys,
    factors,
    initial_state,
    load_part,
    multiplies_wide,
    size_for,
    sizes,
    store_part,
)
from motet_kernels.gpu.launch import LaunchSample
from motet_kernels.spans import Spans


@triton.jit(do_not_specialize=["window"])
def _packed_attention(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    tiles_ptr,
    stride_qn,
    stride_qh,
    stride_kn,
    stride_kk,
    stride_vn,
    stride_vk,
    window,
    scale,
    softcap,
    L: tl.constexpr,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile_ptr, kv_head, num_heads = (
        tiles_ptr + tl.program_id(0) * 4,
        tl.program_id(1),
        tl.num_programs(1) * G,
    )
    start, count, first = tl.load(tile_ptr + 1), tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    line_L = first + tl.arange(0, L)
    mask_L, place_L, head_L = line_L < count * G, line_L // G, kv_head * G + line_L % G
    token_L = (start + place_L).to(tl.int64)
    query_L = query_ptr + token_L * stride_qn + head_L.to(tl.int64) * stride_qh
    query_LD = load_part(query_L, mask_L, 0, D, DIM, WIDE)
    query_LE = load_part(query_L, mask_L, D, E, DIM, WIDE) if E else query_LD

    top, last = first // G, (tl.minimum(first + L, count * G) - 1) // G
    lo, hi, whole, first_L = 0, count, count, place_L - window + 1
    last_L = tl.zeros([L], tl.int32) + count - 1
    if CAUSAL:
        hi, whole, last_L = last + 1, top + 1, place_L
    if WINDOW:
        lo = tl.maximum(top - window + 1, 0)
        last_L = tl.minimum(last_L, place_L + window - 1)
        hi = tl.minimum(hi, last + window)
    keys = key_ptr + start.to(tl.int64) * stride_kn + kv_head.to(tl.int64) * stride_kk, 0, stride_kn
    values = (
        value_ptr + start.to(tl.int64) * stride_vn + kv_head.to(tl.int64) * stride_vk,
        0,
        stride_vn,
        VALUE_DIM,
    )
    visibility = first_L, last_L, lo, hi, scale, softcap
    begin = lo // KEYS * KEYS
    state = initial_state(L, KEYS, V, U)
    if not WINDOW:
        whole = whole // KEYS * KEYS
        state = attend_keys(
            *(
                state,
                query_LD,
                query_LE,
                keys,
                values,
                (tiles_ptr, 0),
                visibility,
                begin,
                whole,
                False,
                False,
            ),
            *(False, False, False, WIDE, None, KEYS, 1, DIM, D, E, VALUE_DIM, V, U),
        )
        begin = whole
    _, sum_L, out_LV, out_LU, _ = attend_keys(
        *(
            state,
            query_LD,
            query_LE,
            keys,
            values,
            (tiles_ptr, 0),
            visibility,
            begin,
            hi,
            True,
            WINDOW,
        ),
        *(False, False, False, WIDE, None, KEYS, 1, DIM, D, E, VALUE_DIM, V, U),
    )
    to_L = out_ptr + (token_L * num_heads + head_L) * VALUE_DIM
    store_part(to_L, out_LV / sum_L[:, None], mask_L, 0, V, VALUE_DIM)
    if U:
        store_part(to_L, out_LU / sum_L[:, None], mask_L, V, U, VALUE_DIM)


_SIZES = sizes(
    _packed_attention,
    (64, 64, [(4, 3, 64), (4, 2, 32)]),
    (128, 128, [(8, 3, 32), (8, 2, 32)]),
    (ANY, 64, [(8, 2, 32)]),
)
# For float32, which matrix units do not multiply.
_WIDE_SIZES = sizes(_packed_attention, (64, 16, [(4, 3, 32)]), (ANY, 16, [(8, 2, 16)]))


def packed_attention(
    query_NHD: Tensor,
    key_NKD: Tensor,
    value_NKV: Tensor,
    spans: Spans,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute `motet_kernels.attention.full_attention.packed_attention` with Triton."""
    (num_tokens, num_heads, dim), (_, kv_heads, value_dim) = query_NHD.shape, value_NKV.shape
    wide = multiplies_wide(query_NHD, key_NKD, value_NKV)
    size = size_for(dim, _WIDE_SIZES if wide else _SIZES)
    group, key_parts, value_parts = num_heads // kv_heads, DimParts.of(dim), DimParts.of(value_dim)
    tiles = spans.tiles(group, 0, size.lines)
    out_NHV = query_NHD.new_empty(num_tokens, num_heads, value_dim)
    size.kernel(
        (tiles.num_long, kv_heads),
        *(query_NHD, key_NKD, value_NKV, out_NHV, tiles.tiles_T4),
        *(
            *query_NHD.stride()[:2],
            *key_NKD.stride()[:2],
            *value_NKV.stride()[:2],
            window or 0,
            *factors(scale, None),
        ),
        L=size.lines,
        G=group,
        CAUSAL=causal,
        WINDOW=window is not None,
        WIDE=wide,
        DIM=dim,
        D=key_parts.main,
        E=key_parts.tail,
        VALUE_DIM=value_dim,
        V=value_parts.main,
        U=value_parts.tail,
    )
    return out_NHV


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for label, heads, kv_heads, dim, dtype, causal, window in (
        ("20 heads, dim 64", 20, 20, 64, fp16, False, None),
        ("16 heads, dim 72", 16, 16, 72, bf16, False, None),
        ("12 heads, dim 64, window", 12, 12, 64, bf16, False, 64),
        ("16 heads on 8, dim 128, causal", 16, 8, 128, bf16, True, None),
        ("3 heads on 1, dim 256, window", 3, 1, 256, bf16, False, 257),
        ("12 heads, dim 64", 12, 12, 64, fp32, False, None),
    ):
        query = torch.zeros(512, heads, dim, dtype=dtype)
        key = torch.zeros(512, kv_heads, dim, dtype=dtype)
        call = partial(
            packed_attention,
            query,
            key,
            key,
            Spans.of([200, 312]),
            scale=0.1,
            causal=causal,
            window=window,
        )
        yield LaunchSample(f"{label}, {dtype}", call, mma=dtype != fp32)
