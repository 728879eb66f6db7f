"""Compute log-probabilities of chosen and most likely tokens: a program per row, without a sort.

The two passes of `candidates.py` give the sum of all tokens and the few tokens that include the
most likely ones; these are then selected one after the other.

Shapes: R rows of logits, V vocabulary, L rows whose log-probabilities are requested.
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
from motet_kernels.gpu.sampling import candidates
from motet_kernels.gpu.sampling.candidates import gather, group_maxima, kth_largest, read
from motet_kernels.gpu.sampling.draws import not_finite, upload_columns
from motet_kernels.sampling.choice import Logprobs


@triton.jit
def next_most_likely(
    x_ptr,
    temperature,
    values_ptr,
    tokens_ptr,
    count,
    last,
    last_token,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the most likely token after `last`; of equals, the one with the lower id."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    which = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, count, BLOCK):
        x, tokens = read(x_ptr, temperature, values_ptr, tokens_ptr, start, count, ALL, BLOCK)
        behind = (x < last) | ((x == last) & (tokens > last_token))
        better = (
            behind & (start + tl.arange(0, BLOCK) < count) & ((x > best) | (which == 0x7FFFFFFF))
        )
        best = tl.where(better, x, best)
        which = tl.where(better, tokens, which)
    found = tl.max(best, 0)
    return found, tl.min(tl.where(best == found, which, 0x7FFFFFFF), 0)


@triton.jit
def _logprobs(
    logits_ptr,
    stride_r,
    rows_ptr,
    ids_ptr,
    values_ptr,
    tokens_ptr,
    chosen_ptr,
    best_ptr,
    best_ids_ptr,
    V,
    alternatives,
    GROUPS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    x_ptr = logits_ptr + row.to(tl.int64) * stride_r
    values_ptr += index * CAPACITY
    tokens_ptr += index * CAPACITY
    top = group_maxima(x_ptr, V, GROUPS)
    most, least = tl.max(top, 0), tl.full([], float("inf"), tl.float32)
    if (most > float("-inf")) & (not_finite(top) == 0):
        if alternatives > 0:
            least = kth_largest(top, alternatives)
        count, mass = gather(x_ptr, V, 1.0, least, most, values_ptr, tokens_ptr, GROUPS, CAPACITY)
        total = most + tl.log(mass)
        token = tl.maximum(tl.load(ids_ptr + row), 0)
        tl.store(chosen_ptr + index, tl.load(x_ptr + token).to(tl.float32) - total)
        last, last_token = tl.full([], float("inf"), tl.float32), tl.full([], -1, tl.int32)
        for place in range(alternatives):
            if count <= CAPACITY:
                last, last_token = next_most_likely(
                    x_ptr, 1.0, values_ptr, tokens_ptr, count, last, last_token, False, GROUPS
                )
            else:
                last, last_token = next_most_likely(
                    x_ptr, 1.0, values_ptr, tokens_ptr, V, last, last_token, True, GROUPS
                )
            tl.store(best_ptr + index * alternatives + place, last - total)
            tl.store(best_ids_ptr + index * alternatives + place, last_token.to(tl.int64))


_LOGPROBS = GpuKernel(_logprobs, Config(warps=16), Config(warps=4, stages=1))


def logprobs(logits_RV: Tensor, rows: Sequence[int], ids_R: Tensor, most: int) -> Logprobs:
    """Compute `motet_kernels.sampling.sampling.logprobs` with Triton."""
    count, device = len(rows), logits_RV.device
    [rows_L] = upload_columns(device, np.array(rows, np.int32))
    found = Logprobs(
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count, most, dtype=torch.float32, device=device),
        torch.empty(count, most, dtype=torch.int64, device=device),
    )
    given = rows_L, ids_R, *candidates.scratch(logits_RV, count), *found, logits_RV.shape[1], most
    _LOGPROBS(
        (count,),
        logits_RV,
        logits_RV.stride(0),
        *given,
        GROUPS=candidates.GROUPS,
        CAPACITY=candidates.CAPACITY,
    )
    return found


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler."""
    vocab = 151_936
    for dtype in (torch.bfloat16, torch.float32):
        logits_RV, ids_R = torch.zeros(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64)
        label = f"2 × {vocab:,}, {dtype}"
        yield LaunchSample(label, partial(logprobs, logits_RV, [0, 1], ids_R, 5))
