"""Find the most likely tokens of a row, for draws after top-k, top-p and min-p, and `logprobs.py`.

A program per row, in one launch, without a sort. One pass finds the maxima of groups of tokens; the
k-th largest of these bounds the k-th largest logit from below. A second pass computes the sum that
top-p is a share of and gathers the tokens above that bound, mostly a few hundred; the remaining
work is on those alone, unless they are too few (a flat distribution) or too many (ties): then it is
on all tokens.

Thresholds are found by a search on the ordered bits of float32, three pivots to a pass, as in Qrita
(Park et al. 2026, arXiv:2602.01518), whose truncation assumes a normal distribution where this one
counts. Of tokens that tie at a threshold those of lower ids are kept, as many as the filter has
room for. A row's sums are added in one order, whatever the other rows are.

Shapes: R rows of logits, V vocabulary, N rows that are drawn here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample
from motet_kernels.gpu.sampling.draws import (
    gumbel,
    not_finite,
    scaled,
    streams,
    uniform,
    upload_columns,
)
from motet_kernels.sampling.choice import Choice

GROUPS = 2048  # groups of tokens, whose maxima bound the most likely logits
MIN_CANDIDATES = 512  # tokens to look for where top-k does not limit them to fewer
CAPACITY = 4096  # capacity for gathered tokens of a row


# ------------------------------------------------------------------------------------------------------ ordered floats
@triton.jit
def to_ordered_bits(x):
    """Map float32 to an integer of the same order; its own inverse except for the type."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value(key):
    """Map an integer of `to_ordered_bits` back to its float32."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


# -------------------------------------------------------------------------------------------------------- two passes
@triton.jit
def group_maxima(x_ptr, V, GROUPS: tl.constexpr):
    """Return the maxima of groups of logits; NaN propagates."""
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    for start in range(0, V, GROUPS):
        at = start + tl.arange(0, GROUPS)
        x = tl.load(x_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def kth_largest(top, count):
    """Return the count-th largest of the maxima; -inf if there are fewer."""
    low, high = (
        to_ordered_bits(tl.min(top, 0)).to(tl.int64),
        to_ordered_bits(tl.max(top, 0)).to(tl.int64),
    )
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((top >= value(middle)).to(tl.int32), 0) >= count:
            low = middle
        else:
            high = middle - 1
    return value(low)


@triton.jit
def gather(
    x_ptr,
    V,
    temperature,
    least,
    most,
    values_ptr,
    tokens_ptr,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Write the scaled logits of at least `least` and their tokens, in token order, up to CAPACITY.

    Return their number, and the mass `Σ exp(scaled - most)` of all tokens.
    """
    mass = tl.zeros([GROUPS], tl.float32)
    count = 0
    for start in range(0, V, GROUPS):
        at = start + tl.arange(0, GROUPS)
        x = scaled(tl.load(x_ptr + at, mask=at < V, other=float("-inf")), temperature)
        mass += tl.exp(x - most)
        min_candidates = (x >= least) & (at < V)
        found = tl.sum(min_candidates.to(tl.int32), 0)
        if found > 0:
            place = count + tl.cumsum(min_candidates.to(tl.int32), 0) - 1
            fits = min_candidates & (place < CAPACITY)
            tl.store(values_ptr + place, x, mask=fits)
            tl.store(tokens_ptr + place, at, mask=fits)
        count += found
    tl.debug_barrier()  # what other threads wrote is read next by all
    return count, tl.sum(mass, 0)


# --------------------------------------------------------------------- searches, among gathered tokens or all of them
@triton.jit
def read(
    x_ptr, temperature, values_ptr, tokens_ptr, start, count, ALL: tl.constexpr, BLOCK: tl.constexpr
):
    """Return scaled logits, -inf after the last one, and their tokens."""
    at = start + tl.arange(0, BLOCK)
    if ALL:
        return scaled(tl.load(x_ptr + at, mask=at < count, other=float("-inf")), temperature), at
    values = tl.load(values_ptr + at, mask=at < count, other=float("-inf"))
    return values, tl.load(tokens_ptr + at, mask=at < count, other=0)


@triton.jit
def threshold(
    x_ptr,
    temperature,
    values_ptr,
    tokens_ptr,
    count,
    most,
    low,
    target,
    MASS: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest logit such that all logits at or above it reach `target`.

    The goal is a number of tokens or, with MASS, a mass. The logits at or above `low` reach it.
    """
    low, high = to_ordered_bits(low).to(tl.int64), to_ordered_bits(most).to(tl.int64)
    while low < high:
        step = (high - low + 3) // 4
        first, second = low + step, tl.minimum(low + 2 * step, high)
        third = tl.minimum(low + 3 * step, high)
        reached1 = tl.zeros([BLOCK], tl.float32)
        reached2 = tl.zeros([BLOCK], tl.float32)
        reached3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, count, BLOCK):
            x, _ = read(x_ptr, temperature, values_ptr, tokens_ptr, start, count, ALL, BLOCK)
            weight = tl.exp(x - most) if MASS else tl.full([BLOCK], 1.0, tl.float32)
            reached1 += tl.where(x >= value(first), weight, 0.0)
            reached2 += tl.where(x >= value(second), weight, 0.0)
            reached3 += tl.where(x >= value(third), weight, 0.0)
        if tl.sum(reached3, 0) >= target:
            low = third
        elif tl.sum(reached2, 0) >= target:
            low, high = second, third - 1
        elif tl.sum(reached1, 0) >= target:
            low, high = first, second - 1
        else:
            high = first - 1
    return value(low)


@triton.jit
def count_above(
    x_ptr,
    temperature,
    values_ptr,
    tokens_ptr,
    count,
    most,
    limit,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return number and mass of the tokens above a limit."""
    number = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        x, _ = read(x_ptr, temperature, values_ptr, tokens_ptr, start, count, ALL, BLOCK)
        number += tl.where(x > limit, 1.0, 0.0)
        mass += tl.where(x > limit, tl.exp(x - most), 0.0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def choose(
    x_ptr,
    temperature,
    values_ptr,
    tokens_ptr,
    count,
    most,
    least,
    mass,
    top_k,
    top_p,
    min_p,
    stream,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the token that wins the draw among those that pass the filters."""
    limit = least  # tokens above it are kept, and `ties` of those that equal it
    ties = float("inf")
    if top_k > 0:
        limit = threshold(
            x_ptr, temperature, values_ptr, tokens_ptr, count, most, limit, top_k, False, ALL, BLOCK
        )
        number, mass = count_above(
            x_ptr, temperature, values_ptr, tokens_ptr, count, most, limit, ALL, BLOCK
        )
        ties = top_k - number
        mass += ties * tl.exp(limit - most)
    if top_p < 1:
        target = top_p * mass
        cut = threshold(
            x_ptr, temperature, values_ptr, tokens_ptr, count, most, limit, target, True, ALL, BLOCK
        )
        _, before = count_above(
            x_ptr, temperature, values_ptr, tokens_ptr, count, most, cut, ALL, BLOCK
        )
        room = tl.maximum(tl.ceil((target - before) / tl.exp(cut - most)), 1.0)
        ties = tl.where(cut > limit, room, tl.minimum(room, ties))
        limit = cut
    best, token = float("-inf"), 0
    tied = 0.0
    for start in range(0, count, BLOCK):
        x, tokens = read(x_ptr, temperature, values_ptr, tokens_ptr, start, count, ALL, BLOCK)
        equal = tl.where(x == limit, 1.0, 0.0)
        stays = (x > limit) | ((x == limit) & (tied + tl.cumsum(equal, 0) <= ties))
        stays = stays & (tl.exp(x - most) >= min_p)
        score = tl.where(stays, x + gumbel(uniform(stream, tokens)), float("-inf"))
        found = tl.max(score, 0)
        if found > best:
            best = found
            token = tl.min(tl.where(score == found, tokens, 0x7FFFFFFF), 0)
        tied += tl.sum(equal, 0)
    return token


@triton.jit
def _draw_filtered(
    logits_ptr,
    stride_r,
    rows_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    streams_ptr,
    values_ptr,
    tokens_ptr,
    out_ptr,
    V,
    min_candidates,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    x_ptr = logits_ptr + row.to(tl.int64) * stride_r
    temperature, stream = (
        tl.load(temperatures_ptr + index),
        tl.load(streams_ptr + index).to(tl.uint64),
    )
    top_k, top_p, min_p = (
        tl.load(top_k_ptr + index),
        tl.load(top_p_ptr + index),
        tl.load(min_p_ptr + index),
    )
    values_ptr += index * CAPACITY
    tokens_ptr += index * CAPACITY
    top = group_maxima(x_ptr, V, GROUPS)
    most = scaled(tl.max(top, 0), temperature)
    token = tl.full([], -1, tl.int32)
    if (most > float("-inf")) & (not_finite(top) == 0):
        top_k = tl.where(top_k < V, top_k, 0)
        few = (top_k > 0) & (top_k <= min_candidates)
        least = scaled(kth_largest(top, tl.where(few, top_k, min_candidates)), temperature)
        count, mass = gather(
            x_ptr, V, temperature, least, most, values_ptr, tokens_ptr, GROUPS, CAPACITY
        )
        there = tl.minimum(count, CAPACITY)
        _, made = count_above(
            x_ptr, temperature, values_ptr, tokens_ptr, there, most, least, False, GROUPS
        )
        nucleus = ((top_p < 1) & (made >= top_p * mass)) | (tl.exp(least - most) < min_p)
        enough = (count == V) | tl.where(top_k > 0, count >= top_k, nucleus)
        if enough & (count <= CAPACITY):
            token = choose(
                x_ptr, temperature, values_ptr, tokens_ptr, count, most, least, mass, top_k, top_p, min_p, stream,
                False, GROUPS,
            )  # fmt: skip
        else:
            empty = tl.full([], float("-inf"), tl.float32)
            token = choose(
                x_ptr, temperature, values_ptr, tokens_ptr, V, most, empty, mass, top_k, top_p, min_p, stream,
                True, GROUPS,
            )  # fmt: skip
    tl.store(out_ptr + row, token.to(tl.int64))


# 4 and 16 warps spill registers on some GPUs.
_FILTERED = GpuKernel(_draw_filtered, Config(warps=8), Config(warps=8, stages=1))


def draw_filtered(
    logits_RV: Tensor, rows: Sequence[int], choices: Sequence[Choice], ids_R: Tensor
) -> None:
    """Draw from the tokens that the filters leave in `rows`, into `ids_R[rows]`."""
    temperatures, top_k, top_p, min_p, *_ = zip(*choices, strict=True)
    columns = upload_columns(
        logits_RV.device,
        np.array(rows, np.int32),
        np.array(temperatures, np.float32),
        np.minimum(top_k, logits_RV.shape[1]).astype(np.int32),
        np.array(top_p, np.float32),
        np.array(min_p, np.float32),
        streams(choices),
    )
    given = *columns, *scratch(logits_RV, len(rows)), ids_R, logits_RV.shape[1], MIN_CANDIDATES
    _FILTERED(
        (len(rows),), logits_RV, logits_RV.stride(0), *given, GROUPS=GROUPS, CAPACITY=CAPACITY
    )


def scratch(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return buffers for gathered tokens: scaled logits and ids, `[count, CAPACITY]` each."""
    values = torch.empty(count, CAPACITY, dtype=torch.float32, device=logits_RV.device)
    return values, torch.empty(count, CAPACITY, dtype=torch.int32, device=logits_RV.device)


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler."""
    vocab = 151_936
    for dtype in (torch.bfloat16, torch.float32):
        logits_RV, ids_R = torch.zeros(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        choices = [Choice(0.7, 50, 0.9), Choice(1.0, min_p=0.1)]
        label = f"2 × {vocab:,}, {dtype}"
        yield LaunchSample(label, partial(draw_filtered, logits_RV, [0, 1], choices, ids_R))
