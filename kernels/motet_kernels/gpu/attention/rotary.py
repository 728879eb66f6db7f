"""Rotate a step's heads, optionally normed before, and store keys and values in a KV cache.

A program takes a few heads of one token: both halves of the rotated part, and the rest, are in
tiles of their own.

Shapes: N packed tokens, H query heads, K key heads (and K value heads), D head dimension, R rotary
dimension; a cache `[P, K, S, D]` of P blocks of S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.attention.head_norm import HeadNorm
from motet_kernels.attention.kv_format import dim_of, row_size
from motet_kernels.gpu.codes import WORD_BYTES, encoded, largest_of, pages, scale_at, scale_of
from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample


@triton.jit
def _columns(START: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the dimensions `[1, BLOCK]` of a part of a head, and which of them exist."""
    at = tl.arange(0, BLOCK)[None, :]
    return START + at, at < COUNT


@triton.jit
def _part(x_ptr, heads, columns, mask):
    return tl.load(x_ptr + heads + columns, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, scale, q_weight_ptr, k_weight_ptr, is_query, columns, exists, offset):
    """Return x normed by `scale [heads, 1]` and the weights of queries or keys."""
    q_weight = tl.load(q_weight_ptr + columns, mask=exists, other=0.0)
    k_weight = tl.load(k_weight_ptr + columns, mask=exists, other=0.0)
    return x * scale * (tl.where(is_query, q_weight, k_weight) + offset)


@triton.jit
def _put(
    x, out, key, value, columns, is_out, is_key, is_value, exists, scale, inverse, STORES: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Write a part of the heads to each head's destination: the result, or the token's slot."""
    tl.store(out + columns, x, mask=is_out & exists)
    if STORES:
        stored = x if CODES is None else encoded(x, scale, inverse, CODES == "float8")
        tl.store(key + columns, stored, mask=is_key & exists)
        tl.store(value + columns, stored, mask=is_value & exists)


@triton.jit
def _rotate(
    x_ptr, stride_n, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, eps, offset, out_ptr,
    key_ptr, key_stride_p, key_stride_k, key_stride_s, value_ptr, value_stride_p, value_stride_k, value_stride_s,
    slots_ptr, num_slots, SLOTS, H, K, HEADS_IN, HEADS_OUT,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    NORMED: tl.constexpr, STORES: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    word: tl.constexpr = 1 if CODES is None else WORD_BYTES
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    x_ptr += token * stride_n
    heads = head * D
    half: tl.constexpr = R // 2
    first_at, in_half = _columns(0, half, HALF)
    second_at, _ = _columns(half, half, HALF)
    turns, rests = in_half & (head < HEADS_IN), head < HEADS_IN
    first, second = _part(x_ptr, heads, first_at, turns), _part(x_ptr, heads, second_at, turns)

    is_query, is_value = head < H, head >= H + K
    is_key = (head >= H) & (head < H + K)
    is_out = head < HEADS_OUT
    out = out_ptr + token * HEADS_OUT * D + heads
    key, value = key_ptr, value_ptr
    if STORES:
        slot = tl.load(slots_ptr + token)
        there = (slot >= 0) & (slot < num_slots)
        block, place = slot // SLOTS, slot % SLOTS
        key += (block * key_stride_p + place * key_stride_s + (head - H) * key_stride_k) * word
        value += (
            block * value_stride_p + place * value_stride_s + (head - H - K) * value_stride_k
        ) * word
        is_key, is_value = is_key & there, is_value & there & rests

    if REST > 0:
        rest_at, in_rest = _columns(R, D - R, REST)
        rest = _part(x_ptr, heads, rest_at, in_rest & rests)
    if NORMED:
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        if REST > 0:
            squares += tl.sum(rest * rest, 1, keep_dims=True)
        scale = tl.rsqrt(squares / D + eps)
        rotated = head < H + K
        a = _scaled(first, scale, q_weight_ptr, k_weight_ptr, is_query, first_at, in_half, offset)
        b = _scaled(second, scale, q_weight_ptr, k_weight_ptr, is_query, second_at, in_half, offset)
        first, second = tl.where(rotated, a, first), tl.where(rotated, b, second)
        if REST > 0:
            c = _scaled(rest, scale, q_weight_ptr, k_weight_ptr, is_query, rest_at, in_rest, offset)
            rest = tl.where(rotated, c, rest)

    cos_a, sin_a = (
        _part(cos_ptr, token * R, first_at, in_half),
        _part(sin_ptr, token * R, first_at, in_half),
    )
    cos_b, sin_b = (
        _part(cos_ptr, token * R, second_at, in_half),
        _part(sin_ptr, token * R, second_at, in_half),
    )
    stays = head >= H + K
    a = tl.where(stays, first, first * cos_a - second * sin_a)
    b = tl.where(stays, second, second * cos_b + first * sin_b)
    step, inverse = 0.0, 0.0
    if CODES is not None:
        largest = tl.maximum(largest_of(a), largest_of(b))
        if REST > 0:
            largest = tl.maximum(largest, largest_of(rest))
        step, inverse = scale_of(largest, CODES == "float8")
        tl.store(scale_at(key, D), step, mask=is_key)
        tl.store(scale_at(value, D), step, mask=is_value)
    _put(
        a,
        out,
        key,
        value,
        first_at,
        is_out,
        is_key,
        is_value,
        in_half,
        step,
        inverse,
        STORES,
        CODES,
    )
    _put(
        b,
        out,
        key,
        value,
        second_at,
        is_out,
        is_key,
        is_value,
        in_half,
        step,
        inverse,
        STORES,
        CODES,
    )
    if REST > 0:
        _put(
            rest,
            out,
            key,
            value,
            rest_at,
            is_out,
            is_key,
            is_value,
            in_rest,
            step,
            inverse,
            STORES,
            CODES,
        )


def _fits(constants: Constants) -> bool:
    """Return True if a thread holds at most 32 elements of each part, or 8 where they are coded."""
    heads, most = constants["HEADS"], 2048 if constants["CODES"] is None else 512
    return bool(heads == 1 or heads * max(constants["HALF"], constants["REST"]) <= most)


_ROTATE = GpuKernel(
    _rotate,
    Config(warps=4, constants={"HEADS": 16}),
    Config(warps=4, constants={"HEADS": 8}),
    Config(warps=2, constants={"HEADS": 4}),
    Config(warps=4, constants={"HEADS": 1}),
    fits=_fits,
)


def rotate_heads(
    x_NC: Tensor, num_queries: int, dim: int, cos_NR: Tensor, sin_NR: Tensor, norm: HeadNorm | None
) -> Tensor:
    """Compute `motet_kernels.attention.rotary.rotate_heads` with Triton."""
    heads = x_NC.shape[1] // dim
    out_NHD = x_NC.new_empty(len(x_NC), heads, dim)
    # Without STORES the cache is not accessed: any tensor of a writable type can stand for it.
    nowhere = (out_NHD, 0, 0, 0)
    slots_N = x_NC.new_empty(0, dtype=torch.int64)
    counts = (num_queries, heads - num_queries, heads, heads)
    _run(
        x_NC,
        dim,
        cos_NR,
        sin_NR,
        norm,
        out_NHD,
        *nowhere,
        *nowhere,
        slots_N,
        0,
        1,
        *counts,
        stores=False,
        codes=None,
    )
    return out_NHD


def rotate_store_kv(
    x_NC: Tensor,
    num_queries: int,
    cos_NR: Tensor,
    sin_NR: Tensor,
    norm: HeadNorm | None,
    key_PKSD: Tensor,
    value_PKSD: Tensor,
    slots_N: Tensor,
) -> Tensor:
    """Compute `motet_kernels.attention.rotary.rotate_store_kv` with Triton.

    A token whose slot is out of range is not stored.
    """
    (blocks, keys, slots, _), dim = key_PKSD.shape, dim_of(key_PKSD)
    out_NHD = x_NC.new_empty(len(x_NC), num_queries, dim)
    key, key_strides, codes = pages("key_PKSD", key_PKSD)
    value, value_strides, _ = pages("value_PKSD", value_PKSD)
    counts = (num_queries, keys, num_queries + 2 * keys, num_queries)
    _run(
        x_NC,
        dim,
        cos_NR,
        sin_NR,
        norm,
        out_NHD,
        key,
        *key_strides,
        value,
        *value_strides,
        slots_N,
        blocks * slots,
        slots,
        *counts,
        stores=True,
        codes=codes,
    )
    return out_NHD


def _run(
    x_NC: Tensor,
    dim: int,
    cos_NR: Tensor,
    sin_NR: Tensor,
    norm: HeadNorm | None,
    *out: Tensor | int,
    stores: bool,
    codes: str | None,
) -> None:
    """Launch the kernel. `out`: its arguments from `out_ptr` to `HEADS_OUT`."""
    rotary, heads = cos_NR.shape[1], x_NC.shape[1] // dim
    sizes = {
        "D": dim,
        "R": rotary,
        "HALF": _block(rotary // 2),
        "REST": _block(dim - rotary) if rotary < dim else 0,
    }
    q_weight, k_weight, eps, offset = norm if norm is not None else (cos_NR, cos_NR, 0.0, 0.0)
    tables = (cos_NR, sin_NR, q_weight, k_weight, eps, offset)
    _ROTATE(
        partial(_programs, len(x_NC), heads),
        *(x_NC, x_NC.stride(0), *tables, *out),
        NORMED=norm is not None,
        STORES=stores,
        CODES=codes,
        **sizes,
    )


def _block(count: int) -> int:
    value: int = triton.next_power_of_2(max(count, 1))
    return value


def _programs(tokens: int, heads: int, constants: Constants) -> tuple[int, int]:
    return tokens, triton.cdiv(heads, constants["HEADS"])


def samples() -> Iterator[LaunchSample]:
    """Yield query, key and value matrices of Llama, Qwen3, Phi (partly rotary) and Gemma."""
    slots_N = torch.zeros(2, dtype=torch.int64)
    for name, heads, keys, dim, rotary, normed, dtype in (
        ("32 + 8 heads of 128", 32, 8, 128, 128, False, torch.bfloat16),
        ("32 + 8 normed heads of 128", 32, 8, 128, 128, True, torch.bfloat16),
        ("32 + 8 normed heads of 128", 32, 8, 128, 128, True, torch.float16),
        ("16 + 8 normed heads of 64", 16, 8, 64, 64, True, torch.float32),
        ("24 + 8 heads of 96, 72 turn", 24, 8, 96, 72, False, torch.bfloat16),
        ("8 + 4 normed heads of 256", 8, 4, 256, 256, True, torch.bfloat16),
    ):
        x_NC = torch.zeros(2, (heads + 2 * keys) * dim, dtype=dtype)
        table, weight = torch.zeros(2, rotary), torch.zeros(dim)
        norm = HeadNorm(weight, weight, 1e-6) if normed else None
        label = f"{name}, {dtype}"
        yield LaunchSample(
            label,
            partial(rotate_heads, x_NC[:, : (heads + keys) * dim], heads, dim, table, table, norm),
        )
        for kind in (
            (dtype, torch.int8, torch.float8_e4m3fn) if dtype == torch.bfloat16 else (dtype,)
        ):
            cache = torch.zeros(4, keys, 16, row_size(dim, kind), dtype=kind)
            stored = (x_NC, heads, table, table, norm, cache, cache, slots_N)
            what = "stored" if kind == dtype else f"stored in {kind}"
            yield LaunchSample(f"{label}, {what}", partial(rotate_store_kv, *stored))
