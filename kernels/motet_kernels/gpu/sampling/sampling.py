"""Edit logits, apply masks, and draw from all tokens: one pass in many programs, and a merge.

A draw is Gumbel-max over the noise of `motet_kernels.sampling.noise`, whose 64 bits are identical here. Most
tokens cannot win: noise of the uniform number u is below that of `1 - u`'s reciprocal, since
`-log(u) > 1 - u`; so a token whose `1 - u` is not below `exp(scaled - best)` needs no logarithm,
and a block of such tokens none at all.

Ties go to the lower token id. A maximum does not depend on the order of evaluation, so a row's
token does not depend on the split.

Shapes: R rows of logits, V vocabulary, N rows that are drawn here, S parts of the vocabulary, E
edits, W words of 32 tokens.
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
from motet_kernels.gpu.sampling.candidates import draw_filtered
from motet_kernels.gpu.sampling.draws import (
    gumbel,
    not_finite,
    scaled,
    streams,
    uniform,
    upload_columns,
)
from motet_kernels.sampling.choice import GREEDY_BELOW, Choice, Edits

_PROGRAMS = 2048  # programs that fill a GPU
_SHORTEST = 4096  # minimum tokens of a program's part of the vocabulary


@triton.jit
def _edit(
    logits_ptr,
    stride_r,
    rows_ptr,
    tokens_ptr,
    bias_ptr,
    factor_ptr,
    less_ptr,
    E,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < E
    rows = tl.load(rows_ptr + at, mask=mask, other=0).to(tl.int64)
    place = logits_ptr + rows * stride_r + tl.load(tokens_ptr + at, mask=mask, other=0)
    factor = tl.load(factor_ptr + at, mask=mask, other=1.0)
    x = tl.load(place, mask=mask, other=0.0) + tl.load(bias_ptr + at, mask=mask, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    tl.store(place, x - tl.load(less_ptr + at, mask=mask, other=0.0), mask=mask)


@triton.jit
def _forbid(logits_ptr, stride_r, bits_ptr, out_ptr, V, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits_ptr + row * W + at // 32, mask=at < V, other=0)
    allowed = (word >> (at % 32)) & 1 != 0
    x = tl.load(logits_ptr + row * stride_r + at, mask=(at < V) & allowed, other=float("-inf"))
    tl.store(out_ptr + row * V + at, x, mask=at < V)


@triton.jit
def _gumbel_max(
    logits_ptr,
    stride_r,
    rows_ptr,
    temperatures_ptr,
    streams_ptr,
    scores_ptr,
    tokens_ptr,
    V,
    share,
    splits,
    greedy_below,
    BLOCK: tl.constexpr,
):
    index, split = tl.program_id(0), tl.program_id(1)
    x_ptr = logits_ptr + tl.load(rows_ptr + index).to(tl.int64) * stride_r
    temperature = tl.load(temperatures_ptr + index)
    stream = tl.load(streams_ptr + index).to(tl.uint64)
    greedy = temperature < greedy_below
    inverse = 1.0 / tl.where(greedy, 1.0, temperature)
    begin = split * share
    end = tl.minimum(begin + share, V)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    best, threshold = float("-inf"), float("-inf")
    token = begin
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        if greedy:
            may_win = tl.max(x, 0) > best
        else:
            near = 1.0 - uniform(stream, at) < tl.exp(x * inverse - threshold)
            may_win = tl.max(near.to(tl.int32), 0) > 0
        if may_win:
            score = x if greedy else scaled(x, temperature) + gumbel(uniform(stream, at))
            found = tl.max(score, 0)
            if found > best:
                best = found
                threshold = best - (
                    1e-4 + 1e-6 * tl.abs(best)
                )  # margin above the rounding errors of `inverse` and `exp`
                token = tl.min(tl.where(score == found, at, V), 0)
    best = tl.where(not_finite(top), float("inf"), best)
    tl.store(scores_ptr + index * splits + split, best)
    tl.store(tokens_ptr + index * splits + split, token)


@triton.jit
def _merge(scores_ptr, tokens_ptr, rows_ptr, out_ptr, splits, V, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + index * splits + at, mask=at < splits, other=float("-inf"))
    tokens = tl.load(tokens_ptr + index * splits + at, mask=at < splits, other=V)
    best = tl.max(scores, 0)
    token = tl.min(tl.where(scores == best, tokens, V), 0)
    token = tl.where(tl.abs(best) == float("inf"), -1, token)
    tl.store(out_ptr + tl.load(rows_ptr + index), token.to(tl.int64))


_EDIT = GpuKernel(_edit, Config(warps=4, constants={"BLOCK": 256}))
_FORBID = GpuKernel(
    _forbid, *(Config(warps=4, constants={"BLOCK": block}) for block in (1024, 2048, 512))
)
_GUMBEL_MAX = GpuKernel(
    _gumbel_max,
    *(
        Config(warps=warps, constants={"BLOCK": block})
        for warps, block in ((4, 1024), (4, 2048), (8, 2048), (8, 4096))
    ),
)
_MERGE = GpuKernel(_merge, Config(warps=1))


def edit(logits_RV: Tensor, edits: Edits) -> Tensor:
    """Compute `motet_kernels.sampling.sampling.edit` with Triton."""
    edited_RV = logits_RV.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    columns = upload_columns(edited_RV.device, *edits)
    count = len(edits.rows)
    _EDIT(
        lambda c: (triton.cdiv(count, c["BLOCK"]),), edited_RV, edited_RV.stride(0), *columns, count
    )
    return edited_RV


def forbid(logits_RV: Tensor, bits_RW: Tensor) -> Tensor:
    """Compute `motet_kernels.sampling.sampling.forbid` with Triton; forbidden logits are not read."""
    out_RV = torch.empty_like(logits_RV, memory_format=torch.contiguous_format)
    rows, vocab = logits_RV.shape
    sizes = logits_RV.stride(0), bits_RW, out_RV, vocab, bits_RW.shape[1]
    _FORBID(lambda c: (rows, triton.cdiv(vocab, c["BLOCK"])), logits_RV, *sizes)
    return out_RV


def draw(logits_RV: Tensor, choices: Sequence[Choice]) -> Tensor:
    """Compute `motet_kernels.sampling.sampling.draw` with Triton, of logits that are masked already."""
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    plain = [row for row, choice in enumerate(choices) if not choice.filters]
    filtered = [row for row, choice in enumerate(choices) if choice.filters]
    for rows, drawn in ((plain, gumbel_max), (filtered, draw_filtered)):
        if rows:
            drawn(logits_RV, rows, [choices[row] for row in rows], ids_R)
    return ids_R


def gumbel_max(
    logits_RV: Tensor, rows: Sequence[int], choices: Sequence[Choice], ids_R: Tensor
) -> None:
    """Draw from all tokens of `rows`, or take the most likely ones, into `ids_R[rows]`."""
    vocab, count = logits_RV.shape[1], len(rows)
    rows_N, temperatures_N, streams_N = upload_columns(
        logits_RV.device,
        np.array(rows, np.int32),
        np.array([choice.temperature for choice in choices], np.float32),
        streams(choices),
    )
    splits = max(1, min(_PROGRAMS // count, triton.cdiv(vocab, _SHORTEST)))
    share = triton.cdiv(triton.cdiv(vocab, splits), 16) * 16  # a vector load takes 16 tokens
    scores_NS = torch.empty(count, splits, dtype=torch.float32, device=logits_RV.device)
    tokens_NS = torch.empty(count, splits, dtype=torch.int32, device=logits_RV.device)
    given = logits_RV, logits_RV.stride(0), rows_N, temperatures_N, streams_N
    _GUMBEL_MAX((count, splits), *given, scores_NS, tokens_NS, vocab, share, splits, GREEDY_BELOW)
    block = triton.next_power_of_2(splits)
    _MERGE((count,), scores_NS, tokens_NS, rows_N, ids_R, splits, vocab, BLOCK=block)


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler."""
    vocab = 151_936
    for dtype in (torch.bfloat16, torch.float32):
        logits_RV = torch.zeros(2, vocab, dtype=dtype)
        choices = [Choice(1.0), Choice(0.0)]
        label = f"2 × {vocab:,}, {dtype}"
        yield LaunchSample(label, partial(draw, logits_RV, choices))
        bits_RW = torch.zeros(2, vocab // 32 + 1, dtype=torch.int32)
        yield LaunchSample(label, partial(forbid, logits_RV, bits_RW))
    column = np.zeros(3, np.float32)
    edits = Edits(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), column, column + 1, column)
    yield LaunchSample(f"3 of 2 × {vocab:,}", partial(edit, torch.zeros(2, vocab), edits))
