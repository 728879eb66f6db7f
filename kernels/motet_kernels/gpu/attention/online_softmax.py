"""Iterate over the keys of a tile of queries with an online softmax, for all attention kernels.

The algorithm is FlashAttention-2's (Dao 2023, arXiv 2307.08691): scores, their softmax and the
weighted values of a block of keys at a time, never a whole row of scores. Blocks begin at multiples
of KEYS, and a block that a line does not attend to leaves its state unchanged, to the bit; so a
line's result does not depend on what else is in its tile.

A dimension that is no power of two is split into a large power of two and a `tail`, 96 = 64 + 32
and 576 = 512 + 64, where that computes less than the next power of two.

Shapes: L lines of a tile, T keys of a block, D and E the key dim's two parts, V and U the value
dim's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.codes import decoded, scale_at
from motet_kernels.gpu.launch import Config, GpuKernel

LOG2_E = tl.constexpr(1.4426950408889634)
ANY = 1 << 30  # larger than any dim


@triton.jit
def load_part(
    ptr_X, mask_X, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr
):
    """Load `[X, SIZE]`: elements BEGIN to BEGIN + SIZE of the rows at `ptr_X`.

    Elements from DIM on, and rows that are not `mask_X`, are zeros.
    """
    at = BEGIN + tl.arange(0, SIZE)
    if BEGIN + SIZE <= DIM:
        part = tl.load(ptr_X[:, None] + at[None, :], mask=mask_X[:, None], other=0.0)
    else:
        part = tl.load(
            ptr_X[:, None] + at[None, :], mask=mask_X[:, None] & (at < DIM)[None, :], other=0.0
        )
    return part.to(tl.float32) if WIDE else part


@triton.jit
def _load_rows(
    ptr_T, mask_T, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """Load as `load_part`, decoding rows that are coded to TYPE, without their scale."""
    part = load_part(ptr_T, mask_T, BEGIN, SIZE, DIM, WIDE and CODES is None)
    return part if CODES is None else decoded(part, CODES == "float8", TYPE)


@triton.jit
def store_part(ptr_L, part, mask_L, BEGIN: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    """Store `part` `[L, SIZE]` as elements BEGIN to BEGIN + SIZE of the rows at `ptr_L`.

    Elements from DIM on and rows outside `mask_L` are skipped.
    """
    at = BEGIN + tl.arange(0, SIZE)
    tl.store(ptr_L[:, None] + at[None, :], part, mask=mask_L[:, None] & (at < DIM)[None, :])


@triton.jit
def softcapped(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Return scores for a base-2 softmax, soft-capped if SOFTCAP.

    `scale` is the score factor times log2 e, or with a cap times 2 log2 e over the cap (`factors`).
    """
    if SOFTCAP:  # tanh x = 1 - 2 / (e^2x + 1), which is correct at both infinities
        return (1.0 - 2.0 / (tl.exp2(scores * scale) + 1.0)) * softcap
    return scores * scale


@triton.jit
def attend_keys(
    state,
    query_LD,
    query_LE,
    keys,
    values,
    pages,
    visibility,
    begin,
    end,
    HIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGED: tl.constexpr,
    SHARED: tl.constexpr,
    WIDE: tl.constexpr,
    CODES: tl.constexpr,
    KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
    DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    V: tl.constexpr,
    U: tl.constexpr,
):
    """Process the keys from `begin` (a multiple of KEYS) to before `end`; return the new state.

    state: for each line its largest score so far, its sum of weights, its two parts of weighted
        values; for each place in a block whether there was a bad table entry.
    keys, values: (pointer to the row's first, stride of a block, stride of a key); of values also
        the number of elements before a value's scale.
    pages: (pointer to the row's table, number of blocks of the cache).
    visibility: (each line's first key and last key, the tile's first key and the one after its
        last, scale, softcap).
    HIDES: some line does not attend to some of the keys.
    SHARED: values are the first elements of their keys.
    CODES: of keys and values (`codes.py`). A key's scale multiplies its scores, a value's its
        weights, which are bfloat16 then, because float16 lacks the range.
    """
    max_L, sum_L, out_LV, out_LU, bad_T = state
    key_ptr, stride_kp, stride_kt = keys
    value_ptr, stride_vp, stride_vt, before_scale = values
    table_ptr, num_blocks = pages
    first_L, last_L, lo, hi, scale, softcap = visibility
    narrow: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    for base in range(begin, end, KEYS):
        t = base + tl.arange(0, KEYS)
        mask_T = (t >= lo) & (t < hi)
        if PAGED:
            block_T = tl.load(table_ptr + t // SLOTS, mask=mask_T, other=0)
            sound_T = (block_T >= 0) & (block_T < num_blocks)
            bad_T = bad_T | (mask_T & (sound_T == 0)).to(tl.int32)
            mask_T = mask_T & sound_T
            key_T = key_ptr + block_T.to(tl.int64) * stride_kp + (t % SLOTS) * stride_kt
            value_T = value_ptr + block_T.to(tl.int64) * stride_vp + (t % SLOTS) * stride_vt
        else:
            key_T = key_ptr + t.to(tl.int64) * stride_kt
            value_T = value_ptr + t.to(tl.int64) * stride_vt
        key_TD = _load_rows(key_T, mask_T, 0, D, DIM, WIDE, CODES, query_LD.dtype)
        scores_LT = tl.dot(query_LD, tl.trans(key_TD), input_precision="ieee")
        if E:
            key_TE = _load_rows(key_T, mask_T, D, E, DIM, WIDE, CODES, query_LD.dtype)
            scores_LT = tl.dot(query_LE, tl.trans(key_TE), scores_LT, input_precision="ieee")
        if CODES is not None:
            scores_LT *= tl.load(scale_at(key_T, DIM), mask=mask_T, other=0.0)[None, :]
        scores_LT = softcapped(scores_LT, scale, softcap, SOFTCAP)
        if HIDES:
            hidden_LT = t[None, :] > last_L[:, None]
            if WINDOW:
                hidden_LT = hidden_LT | (t[None, :] < first_L[:, None])
            scores_LT = tl.where(hidden_LT, float("-inf"), scores_LT)
        top_L = tl.maximum(max_L, tl.max(scores_LT, 1))
        base_L = tl.where(top_L == float("-inf"), 0.0, top_L)  # for a line without any key so far
        decay_L = tl.exp2(max_L - base_L)
        weights_LT = tl.exp2(scores_LT - base_L[:, None])
        sum_L = sum_L * decay_L + tl.sum(weights_LT, 1)
        max_L = top_L
        value_TV = (
            key_TD if SHARED else _load_rows(value_T, mask_T, 0, V, VALUE_DIM, WIDE, CODES, narrow)
        )
        if CODES is not None:
            weights_LT *= tl.load(scale_at(value_T, before_scale), mask=mask_T, other=0.0)[None, :]
            value_TV = value_TV.to(narrow)
        weights_LT = weights_LT.to(value_TV.dtype)
        out_LV = tl.dot(weights_LT, value_TV, out_LV * decay_L[:, None], input_precision="ieee")
        if U:
            value_TU = _load_rows(value_T, mask_T, V, U, VALUE_DIM, WIDE, CODES, narrow)
            out_LU = tl.dot(weights_LT, value_TU, out_LU * decay_L[:, None], input_precision="ieee")
    return max_L, sum_L, out_LV, out_LU, bad_T


@triton.jit
def initial_state(LINES: tl.constexpr, KEYS: tl.constexpr, V: tl.constexpr, U: tl.constexpr):
    """Return the state of `attend_keys` before the first key."""
    max_L = tl.full([LINES], float("-inf"), tl.float32)
    sum_L = tl.zeros([LINES], tl.float32)
    out_LV = tl.zeros([LINES, V], tl.float32)
    out_LU = tl.zeros([LINES, U if U else 1], tl.float32)
    return max_L, sum_L, out_LV, out_LU, tl.zeros([KEYS], tl.int32)


@dataclass(frozen=True)
class DimParts:
    """Split a dimension into two powers of two, at least 16 each; the second may be 0."""

    main: int
    tail: int

    @classmethod
    def of(cls, dim: int) -> DimParts:
        whole = max(16, triton.next_power_of_2(dim))
        main = whole // 2
        tail = max(16, triton.next_power_of_2(dim - main))
        return cls(main, tail) if main >= 16 and main + tail < whole else cls(whole, 0)


@dataclass(frozen=True)
class KernelSize:
    """Hold a kernel for key dims up to `most`, whose tiles have `lines` lines.

    Every row of a call uses the same one, and no configuration depends on which rows there are,
    because then bits would depend on the other rows of the batch.
    """

    most: int
    lines: int
    kernel: GpuKernel


def sizes(
    function: Any, *given: tuple[int, int, list[tuple[int, int, int]]]
) -> tuple[KernelSize, ...]:
    """Build a `KernelSize` from each (most, lines, [(warps, stages, keys of a block), …]).

    They are in ascending order of `most`; the first configuration of each ships.
    """
    return tuple(
        KernelSize(
            most,
            lines,
            GpuKernel(
                function,
                *(Config(warps=w, stages=s, constants={"KEYS": k}) for w, s, k in settings),
            ),
        )
        for most, lines, settings in given
    )


def size_for(dim: int, among: tuple[KernelSize, ...]) -> KernelSize:
    """Return the first of the sizes for key dims of at least `dim`."""
    return next(size for size in among if dim <= size.most)


def factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return `scale` and `softcap` as `softcapped` takes them."""
    log2_e: float = LOG2_E.value
    return (2 * scale * log2_e / softcap, softcap * log2_e) if softcap else (scale * log2_e, 0.0)


def multiplies_wide(*tensors: Tensor) -> bool:
    """Return True if products are of float32, because the tensors are not all of one 16-bit type.

    Matrix units multiply a single 16-bit type. Coded tensors are not passed here: codes decode to
    any type.
    """
    kinds = {tensor.dtype for tensor in tensors}
    return len(kinds) > 1 or kinds == {torch.float32}
