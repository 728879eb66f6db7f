"""Add adapters to the rows of a product: one launch down to the ranks, one up to the features.

A program takes a tile of up to 16 rows of one adapter, as sorted by the host; the tile's slot
selects the factors. So a batch of any mix takes two launches, and its programs read each adapter
once per 16 rows (BGMV and SGMV of Punica, arXiv 2310.18547, in one). Ranks are padded with zeros to
a power of two of at least 16, as matrix units require. A row's result does not depend on the others
of its tile.

Shapes: as in `motet_kernels.linear.lora`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample
from motet_kernels.linear.segments import GPU_TILE


class Factors(Protocol):
    """Require the attributes of `motet_kernels.linear.lora.LoraFactors` that a launch reads."""

    @property
    def max_rank(self) -> int: ...
    @property
    def down(self) -> Tensor: ...
    @property
    def up(self) -> Tensor: ...
    @property
    def scales_S(self) -> Tensor: ...


@triton.jit
def _tile(tiles_ptr, order_ptr, TILE: tl.constexpr):
    """Return this program's slot, the places of its tile's rows, the rows, and which exist."""
    tile = tiles_ptr + tl.program_id(0) * 3
    first, count = tl.load(tile + 1), tl.load(tile + 2)
    place = first + tl.arange(0, TILE)
    mask = tl.arange(0, TILE) < count
    return (
        tl.load(tile).to(tl.int64),
        place.to(tl.int64),
        tl.load(order_ptr + place, mask=mask, other=0),
        mask,
    )


@triton.jit
def _shrink(
    x_ptr, x_stride, tiles_ptr, order_ptr, down_ptr, scales_ptr, hidden_ptr, K,
    TILE: tl.constexpr, RANK: tl.constexpr, NARROW: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot, place, row, mask = _tile(tiles_ptr, order_ptr, TILE)
    k, r = tl.arange(0, BLOCK_K), tl.arange(0, RANK)
    rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    factors = down_ptr + (slot * RANK + r)[None, :] * K
    sums_TR = tl.zeros((TILE, RANK), tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + k
        x_TK = tl.load(rows + at[None, :], mask=mask[:, None] & (at < K)[None, :], other=0.0)
        down_KR = tl.load(factors + at[:, None], mask=(at < K)[:, None], other=0.0)
        if NARROW:
            sums_TR = tl.dot(x_TK, down_KR.to(x_TK.dtype), sums_TR)
        else:
            sums_TR = tl.dot(
                x_TK.to(tl.float32), down_KR.to(tl.float32), sums_TR, input_precision="ieee"
            )
    sums_TR *= tl.load(scales_ptr + slot)
    tl.store(hidden_ptr + place[:, None] * RANK + r[None, :], sums_TR, mask=mask[:, None])


@triton.jit
def _expand(
    hidden_ptr, tiles_ptr, order_ptr, up_ptr, out_ptr, out_stride, N,
    TILE: tl.constexpr, RANK: tl.constexpr, NARROW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot, place, row, mask = _tile(tiles_ptr, order_ptr, TILE)
    n, r = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    hidden_TR = tl.load(
        hidden_ptr + place[:, None] * RANK + r[None, :], mask=mask[:, None], other=0.0
    )
    up_RN = tl.load(
        up_ptr + (slot * N + n)[None, :] * RANK + r[:, None], mask=(n < N)[None, :], other=0.0
    )
    if NARROW:
        added_TN = tl.dot(hidden_TR.to(up_RN.dtype), up_RN)
    else:
        added_TN = tl.dot(hidden_TR, up_RN.to(tl.float32), input_precision="ieee")
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + n[None, :]
    there = mask[:, None] & (n < N)[None, :]
    added_TN += tl.load(out, mask=there, other=0.0).to(tl.float32)
    tl.store(out, added_TN.to(out_ptr.dtype.element_ty), mask=there)


def _small(constants: Constants) -> bool:
    return bool(constants["RANK"] <= 64 and constants["NARROW"])


_SHRINK = GpuKernel(
    _shrink,
    Config(warps=4, stages=3, constants={"BLOCK_K": 128}),
    Config(warps=4, stages=2, constants={"BLOCK_K": 64}),
    Config(warps=8, stages=2, constants={"BLOCK_K": 32}),
    fits=lambda constants: constants["BLOCK_K"] <= (128 if _small(constants) else 32),
)
_EXPAND = GpuKernel(
    _expand,
    Config(warps=4, stages=1, constants={"BLOCK_N": 128}),
    Config(warps=4, stages=1, constants={"BLOCK_N": 64}),
    Config(warps=8, stages=1, constants={"BLOCK_N": 32}),
    fits=lambda constants: constants["BLOCK_N"] <= (128 if _small(constants) else 32),
)


def add_lora(
    x_MK: Tensor, out_MN: Tensor, tiles_T3: Tensor, order_M: Tensor, factors: Factors
) -> None:
    """Add to `out_MN` in place; rows of both tensors are dense, at any stride."""
    narrow = x_MK.dtype.itemsize == 2 and factors.up.dtype.itemsize == 2
    constants = {"TILE": GPU_TILE, "RANK": factors.max_rank, "NARROW": narrow}
    hidden_MR = torch.empty(len(x_MK), factors.max_rank, device=x_MK.device)
    tiles, features = len(tiles_T3), out_MN.shape[1]
    _SHRINK(
        (tiles,), x_MK, x_MK.stride(0), tiles_T3, order_M, factors.down, factors.scales_S, hidden_MR, x_MK.shape[1],
        **constants,
    )  # fmt: skip
    _EXPAND(
        lambda sizes: (tiles, triton.cdiv(features, sizes["BLOCK_N"])),
        hidden_MR, tiles_T3, order_M, factors.up, out_MN, out_MN.stride(0), features,
        **constants,
    )  # fmt: skip


def samples() -> Iterator[LaunchSample]:
    """Yield decode of many adapters and a prompt of one, at the sizes of large models."""
    for rank, inputs, features, dtype in (
        (16, 4096, 4096, torch.bfloat16),
        (64, 4096, 12288, torch.bfloat16),
        (16, 4096, 4096, torch.float16),
        (16, 1000, 1000, torch.float32),
    ):
        yield LaunchSample(
            f"rank {rank}, {inputs:,} to {features:,}, {dtype}",
            partial(_call, rank, inputs, features, dtype),
            mma=dtype != torch.float32,
        )


class _Shapes:
    """Provide factors of zeros for the compiler."""

    def __init__(self, rank: int, inputs: int, features: int, dtype: torch.dtype):
        self.max_rank = rank
        self.down, self.up = (
            torch.zeros(4, rank, inputs, dtype=dtype),
            torch.zeros(4, features, rank, dtype=dtype),
        )
        self.scales_S = torch.zeros(4)


def _call(rank: int, inputs: int, features: int, dtype: torch.dtype) -> None:
    x_MK, out_MN = torch.zeros(64, inputs, dtype=dtype), torch.zeros(64, features, dtype=dtype)
    tiles, order = torch.zeros(4, 3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    add_lora(x_MK, out_MN, tiles, order, _Shapes(rank, inputs, features, dtype))
