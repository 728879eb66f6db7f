"""Multiply by weights of 4 or 8 bits in groups, stored as by `motet_kernels.linear.grouped_linear`.

A program computes a tile of output features x rows, with weights as the left factor, as in
`linear.py`. Codes are converted to float32, scaled and shifted, and rounded to the rows' type;
products of float32 rows are of float32.

Shapes: M rows, N output features, K input features, G groups of them.
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

from motet_kernels.gpu.codes import decoded
from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample
from motet_kernels.gpu.linear.linear import MIN_ROWS, finish
from motet_kernels.linear.levels import LEVELS

_BYTES = tl.constexpr(64)  # bytes of a row of codes that a program takes at a time


class Groups(Protocol):
    """Require the attributes of `motet_kernels.linear.grouped_linear.GroupedLinear` that are read."""

    @property
    def packed(self) -> Tensor: ...
    @property
    def scale_NG(self) -> Tensor: ...
    @property
    def shift_NG(self) -> Tensor | None: ...
    @property
    def bias_N(self) -> Tensor | None: ...
    @property
    def levels(self) -> Tensor | None: ...
    @property
    def nibbles(self) -> bool: ...
    @property
    def codes(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def offset(self) -> float: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


@triton.jit
def _weights(levels_NK, scale_ptr, shift_ptr, n, k, N, K, groups, offset, GROUP: tl.constexpr):
    """Return the weights that levels of inputs `k` represent; zero from K on."""
    at = n.to(tl.int64)[:, None] * groups + (k // GROUP)[None, :]
    mask = (n[:, None] < N) & (k < K)[None, :]
    weights = tl.load(scale_ptr + at, mask=mask, other=0.0).to(tl.float32) * (levels_NK - offset)
    if shift_ptr is not None:
        weights += tl.load(shift_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return weights


@triton.jit
def _levels(codes_NK, level_ptr):
    """Return the levels of codes of four bits, float32."""
    if level_ptr is not None:
        return tl.load(level_ptr + codes_NK.to(tl.int32))
    return codes_NK.to(tl.float32)


@triton.jit
def _rows(x_ptr, m, k, M, K, stride_m):
    """Load `[k, m]` of the input."""
    mask = (m[None, :] < M) & (k[:, None] < K)
    return tl.load(x_ptr + m.to(tl.int64)[None, :] * stride_m + k[:, None], mask=mask, other=0.0)


@triton.jit
def grouped_sums(
    x_ptr,
    code_ptr,
    scale_ptr,
    shift_ptr,
    level_ptr,
    n,
    m,
    M,
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
    """Return the products `[n, m]` of rows `m` below M with output features `n`, in float32."""
    j = tl.arange(0, _BYTES)
    codes = code_ptr + n.to(tl.int64)[:, None] * row_bytes + j[None, :]
    sums_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, row_bytes, _BYTES):
        mask = (n[:, None] < N) & (first + j < row_bytes)[None, :]
        bytes_NK = tl.load(codes + first, mask=mask, other=0)
        if NIBBLES:
            low = first * 2 + j // 16 * 32 + j % 16
            low_KM, high_KM = (
                _rows(x_ptr, m, low, M, K, stride_m),
                _rows(x_ptr, m, low + 16, M, K, stride_m),
            )
            nibbles = _levels(bytes_NK & 15, level_ptr)
            low_NK = _weights(nibbles, scale_ptr, shift_ptr, n, low, N, K, groups, offset, GROUP)
            nibbles = _levels(bytes_NK >> 4, level_ptr)
            high_NK = _weights(
                nibbles, scale_ptr, shift_ptr, n, low + 16, N, K, groups, offset, GROUP
            )
            sums_NM = tl.dot(low_NK.to(low_KM.dtype), low_KM, sums_NM, input_precision="ieee")
            sums_NM = tl.dot(high_NK.to(high_KM.dtype), high_KM, sums_NM, input_precision="ieee")
        else:
            x_KM = _rows(x_ptr, m, first + j, M, K, stride_m)
            w_NK = _weights(
                decoded(bytes_NK, FLOAT8, tl.float32),
                scale_ptr,
                shift_ptr,
                n,
                first + j,
                N,
                K,
                groups,
                offset,
                GROUP,
            )
            sums_NM = tl.dot(w_NK.to(x_KM.dtype), x_KM, sums_NM, input_precision="ieee")
    return sums_NM


@triton.jit
def _grouped_linear(
    x_ptr,
    code_ptr,
    scale_ptr,
    shift_ptr,
    level_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    K,
    row_bytes,
    groups,
    stride_m,
    residual_stride,
    offset,
    NIBBLES: tl.constexpr,
    FLOAT8: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    sums_NM = grouped_sums(
        x_ptr,
        code_ptr,
        scale_ptr,
        shift_ptr,
        level_ptr,
        n,
        m,
        M,
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
    finish(sums_NM, bias_ptr, residual_ptr, out_ptr, n, m, M, N, residual_stride)


_FEW = GpuKernel(
    _grouped_linear,
    Config(
        warps=4, stages=2, constants={"BLOCK_N": 32, "BLOCK_M": MIN_ROWS}
    ),  # scales and shifts take part in the pipeline, too
    Config(warps=8, stages=2, constants={"BLOCK_N": 64, "BLOCK_M": MIN_ROWS}),
)
_MANY = GpuKernel(
    _grouped_linear,
    Config(warps=8, stages=2, constants={"BLOCK_N": 64, "BLOCK_M": 64}),
    Config(warps=4, stages=2, constants={"BLOCK_N": 64, "BLOCK_M": 32}),
)


def grouped_linear(x_MK: Tensor, linear: Groups, residual_MN: Tensor | None) -> Tensor:
    """Return the product `[M, N]` in x's type; inputs are in the order of the codes."""
    rows, features = len(x_MK), linear.out_features
    out_MN = x_MK.new_empty(rows, features)
    kernel = _FEW if rows <= MIN_ROWS else _MANY
    kernel(
        partial(_tiles, rows, features),
        *(
            x_MK,
            linear.packed,
            linear.scale_NG,
            linear.shift_NG,
            linear.levels,
            linear.bias_N,
            residual_MN,
            out_MN,
        ),
        *(
            rows,
            features,
            linear.in_features,
            linear.packed.shape[1],
            linear.scale_NG.shape[1],
            x_MK.stride(0),
        ),
        *(0 if residual_MN is None else residual_MN.stride(0), linear.offset),
        NIBBLES=linear.nibbles,
        FLOAT8=linear.codes == "float8",
        GROUP=linear.group,
    )
    return out_MN


def _tiles(rows: int, features: int, constants: Constants) -> tuple[int, int]:
    return triton.cdiv(features, constants["BLOCK_N"]), triton.cdiv(rows, constants["BLOCK_M"])


@dataclass(frozen=True)
class _Zeros:
    """Provide groups of zeros for the compiler, of 128 output and 4,096 input features."""

    codes: str
    group: int
    shifted: bool
    scales: torch.dtype
    bias_N: None = None
    in_features: int = 4096
    out_features: int = 128

    @property
    def nibbles(self) -> bool:
        return self.codes not in ("int8", "float8")

    @property
    def levels(self) -> Tensor | None:
        return LEVELS[self.codes].tensor if self.codes in LEVELS else None

    @property
    def packed(self) -> Tensor:
        inputs_per_byte = 2 if self.nibbles else 1
        return torch.zeros(128, 4096 // inputs_per_byte, dtype=torch.uint8)

    @property
    def scale_NG(self) -> Tensor:
        return torch.zeros(128, 4096 // self.group, dtype=self.scales)

    @property
    def shift_NG(self) -> Tensor | None:
        return self.scale_NG if self.shifted else None

    @property
    def offset(self) -> float:
        return 8.0 if self.codes == "int4" and not self.shifted else 0.0


def samples() -> Iterator[LaunchSample]:
    """Yield GPTQ and AWQ in groups of 128, Q4_K in groups of 32, MXFP4, nf4, int8, float8, float32 rows.

    int8 comes in groups of 32 and, like float8, with a scale per output.
    """
    narrow, wide = torch.float16, torch.float32
    for codes, group, shifted, scales, dtype, rows in (
        ("int4", 128, False, narrow, torch.bfloat16, 1),
        ("int4", 128, True, wide, torch.float16, 1),
        ("int4", 128, True, wide, torch.bfloat16, 512),
        ("int4", 32, True, wide, torch.bfloat16, 512),
        ("fp4", 32, False, torch.bfloat16, torch.bfloat16, 1),
        ("nf4", 64, False, wide, torch.bfloat16, 512),
        ("int8", 32, False, narrow, torch.bfloat16, 1),
        ("int8", 4096, False, wide, torch.bfloat16, 512),
        ("float8", 4096, False, wide, torch.bfloat16, 512),
        ("int4", 128, True, wide, torch.float32, 1),
    ):
        linear = _Zeros(codes, group, shifted, scales)
        x_MK = torch.zeros(rows, 4096, dtype=dtype)
        name = f"{codes}:{group}{', shifted' if shifted else ''}, {rows} x 4,096, {dtype}"
        yield LaunchSample(
            name, partial(grouped_linear, x_MK, linear, None), mma=dtype != torch.float32
        )
