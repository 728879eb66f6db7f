"""Multiply rows, sorted by expert, by their expert's weights of 4 or 8 bits in groups.

One launch computes all experts: a program takes a tile of output features x rows of one expert, as
`motet_kernels.linear.expert_linear.ExpertRows` lists them, and computes it as `grouped_linear.py`.

Shapes: R rows, E experts, N output features, K input features, T tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample
from motet_kernels.gpu.linear.grouped_linear import grouped_sums
from motet_kernels.gpu.linear.linear import finish


class Experts(Protocol):
    """Require the attributes of `motet_kernels.linear.expert_linear.ExpertLinear` that are read."""

    packed: Tensor
    scale_ENG: Tensor
    shift_ENG: Tensor | None
    bias_EN: Tensor | None
    levels: Tensor | None
    nibbles: bool
    codes: str
    group: int
    offset: float
    in_features: int
    out_features: int


@triton.jit
def _expert_linear(
    x_ptr,
    code_ptr,
    scale_ptr,
    shift_ptr,
    level_ptr,
    bias_ptr,
    tile_ptr,
    out_ptr,
    N,
    K,
    row_bytes,
    groups,
    stride_m,
    offset,
    NIBBLES: tl.constexpr,
    FLOAT8: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    tile = tile_ptr + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count > 0:
        expert_row = tl.load(tile).to(tl.int64) * N
        first = tl.load(tile + 1)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        m = first + tl.arange(0, BLOCK_M)
        if shift_ptr is not None:
            shift_ptr += expert_row * groups
        if bias_ptr is not None:
            bias_ptr += expert_row
        sums_NM = grouped_sums(
            x_ptr,
            code_ptr + expert_row * row_bytes,
            scale_ptr + expert_row * groups,
            shift_ptr,
            level_ptr,
            n,
            m,
            first + count,
            N,
            K,
            row_bytes,
            groups,
            stride_m,
            offset,
            NIBBLES,
            FLOAT8,
            GROUP,
            BLOCK_N,
            BLOCK_M,
        )
        finish(sums_NM, bias_ptr, None, out_ptr, n, m, first + count, N, 0)


_FEW = GpuKernel(
    _expert_linear,
    Config(warps=4, stages=2, constants={"BLOCK_N": 32}),
    Config(warps=8, stages=2, constants={"BLOCK_N": 64}),
)
_MANY = GpuKernel(
    _expert_linear,
    Config(warps=8, stages=2, constants={"BLOCK_N": 64}),
    Config(warps=4, stages=2, constants={"BLOCK_N": 64}),
)


def expert_linear(x_RK: Tensor, tiles_T3: Tensor, tile: int, experts: Experts) -> Tensor:
    """Return the products `[R, N]` in x's type; rows of no tile are zero.

    tiles_T3: expert, first row and number of rows, at most `tile`, which is 16 or 64.
    """
    out_RN = x_RK.new_zeros(len(x_RK), experts.out_features)
    kernel = _FEW if tile == 16 else _MANY
    kernel(
        partial(_grid, experts.out_features, len(tiles_T3)),
        *(x_RK, experts.packed, experts.scale_ENG, experts.shift_ENG, experts.levels),
        *(experts.bias_EN, tiles_T3, out_RN, experts.out_features, experts.in_features),
        *(experts.packed.shape[2], experts.scale_ENG.shape[2], x_RK.stride(0), experts.offset),
        NIBBLES=experts.nibbles,
        FLOAT8=experts.codes == "float8",
        GROUP=experts.group,
        BLOCK_M=tile,
    )
    return out_RN


def _grid(features: int, tiles: int, constants: Constants) -> tuple[int, int]:
    return triton.cdiv(features, constants["BLOCK_N"]), tiles


@dataclass
class _Zeros:
    """Provide two experts of zeros for the compiler, of 128 output and 4,096 input features."""

    codes: str
    group: int
    scales: torch.dtype
    levels: Tensor | None = None
    shift_ENG: Tensor | None = None
    bias_EN: Tensor | None = None
    in_features: int = 4096
    out_features: int = 128

    def __post_init__(self) -> None:
        self.nibbles = self.codes == "int4"
        self.offset = 8.0 if self.nibbles else 0.0
        width = 4096 // (2 if self.nibbles else 1)
        self.packed = torch.zeros(2, 128, width, dtype=torch.uint8)
        self.scale_ENG = torch.zeros(2, 128, 4096 // self.group, dtype=self.scales)


def samples() -> Iterator[LaunchSample]:
    """Yield experts of 4 bits in groups of 32, of 8 bits and of float8 with a scale per output."""
    for codes, group, scales, rows, tile in (
        ("int4", 32, torch.bfloat16, 16, 16),
        ("int4", 32, torch.bfloat16, 512, 64),
        ("int8", 4096, torch.float32, 512, 64),
        ("float8", 4096, torch.float32, 16, 16),
    ):
        experts = _Zeros(codes, group, scales)
        x_RK = torch.zeros(rows, 4096, dtype=torch.bfloat16)
        tiles_T3 = torch.zeros(2 + rows // tile, 3, dtype=torch.int32)
        yield LaunchSample(
            f"{codes}:{group}, 2 experts, {rows} x 4,096, {x_RK.dtype}",
            partial(expert_linear, x_RK, tiles_T3, tile, experts),
            mma=True,
        )
