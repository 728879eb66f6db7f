"""Multiply by weights of 8 and of 4 bits, stored as by `motet_kernels.linear.row_linear`.

A program computes a tile of output features x rows, with the weights as the left factor: on Hopper
that is the one which may come from registers, so that nibbles go from their loads through a few
instructions into the matrix unit (as in Marlin, arXiv 2408.11743, and Machete). Up to 16 rows are
one tile, which streams the weights. Where there are fewer tiles than a GPU can run at once, the
inputs are split too; a second kernel adds the parts in order. So a call gives the same bits each
time, and for int8, whose sums are exact, a row gives the same bits whatever the other rows are.

int4 weights are converted from nibbles and scales and rounded to the rows' 16-bit type before they
are multiplied.

Shapes: M rows, N output features, K input features, B blocks of 128 of them, G groups of 32, S
splits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample
from motet_kernels.gpu.linear.quantization import quantize_rows
from motet_kernels.linear.quantization import GROUP
from motet_kernels.linear.row_layout import BLOCK

MIN_ROWS = 16  # rows of a tile of the smallest size that matrix units take
RESIDENT_PROGRAMS = (
    264  # programs that keep a large GPU busy: two for each multiprocessor of an H100
)
MIN_SPLIT_BLOCKS = 4  # minimum blocks of a split

_BLOCK, _HALF = tl.constexpr(BLOCK), tl.constexpr(BLOCK // 2)


# ------------------------------------------------------------------------------------------------------------- products
@triton.jit
def finish(out_NM, bias_ptr, residual_ptr, out_ptr, n, m, M, N, residual_stride):
    mask = (n[:, None] < N) & (m[None, :] < M)
    wide_m = m[None, :].to(tl.int64)
    if bias_ptr is not None:
        out_NM += tl.load(bias_ptr + n, mask=n < N, other=0.0)[:, None]
    if residual_ptr is not None:
        out_NM += tl.load(
            residual_ptr + wide_m * residual_stride + n[:, None], mask=mask, other=0.0
        ).to(tl.float32)
    tl.store(out_ptr + wide_m * N + n[:, None], out_NM, mask=mask)


@triton.jit
def _int8_linear(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    padded,
    inputs_per_split,
    residual_stride,
    PARTIAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    split = tl.program_id(2)
    start = split * inputs_per_split
    weights = weight_ptr + n.to(tl.int64)[:, None] * padded + k[None, :]
    rows = x_ptr + m.to(tl.int64)[None, :] * padded + k[:, None]
    sums_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for first in range(start, tl.minimum(start + inputs_per_split, padded), BLOCK_K):
        w_NK = tl.load(weights + first, mask=n[:, None] < N, other=0)
        x_KM = tl.load(rows + first, mask=m[None, :] < M, other=0)
        sums_NM = tl.dot(w_NK, x_KM, sums_NM, out_dtype=tl.int32)
    if PARTIAL:
        finish(sums_NM, None, None, out_ptr + split.to(tl.int64) * M * N, n, m, M, N, 0)
    else:
        scales = tl.load(scale_ptr + n, mask=n < N, other=0.0)[:, None]
        scales = scales * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[None, :]
        finish(
            sums_NM.to(tl.float32) * scales,
            bias_ptr,
            residual_ptr,
            out_ptr,
            n,
            m,
            M,
            N,
            residual_stride,
        )


@triton.jit
def _weights(nibbles_NK, scales, n, N, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """Return float32 weights of nibbles `[n, HALF]` with the scales of their groups of 32.

    `scales`: pointers `[n]` to the first scale.
    """
    groups: tl.constexpr = HALF // 32
    # 2^23 + nibble, assembled from bits: a quarter of the time of a conversion on GPUs.
    wide = (nibbles_NK.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    at = scales[:, None] + tl.arange(0, groups)[None, :]
    scale = tl.load(at, mask=n[:, None] < N, other=0.0).to(tl.float32)
    return (wide.reshape(BLOCK_N, groups, 32) * scale[:, :, None]).reshape(BLOCK_N, HALF)


@triton.jit
def _int4_linear(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    K,
    blocks,
    blocks_per_split,
    stride_m,
    residual_stride,
    PARTIAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, _HALF)
    split = tl.program_id(2)
    wide_n = n.to(tl.int64)
    weights = weight_ptr + wide_n[:, None] * (blocks * _HALF) + k[None, :]
    scales = scale_ptr + wide_n * (blocks * 4)
    rows = x_ptr + m.to(tl.int64)[None, :] * stride_m + k[:, None]
    sums_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(
        split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, blocks)
    ):
        both = tl.load(weights + block * _HALF, mask=n[:, None] < N, other=0x88)
        at = block * _BLOCK + k[:, None]
        low_KM = tl.load(rows + block * _BLOCK, mask=(m[None, :] < M) & (at < K), other=0.0)
        high_KM = tl.load(
            rows + block * _BLOCK + _HALF, mask=(m[None, :] < M) & (at + _HALF < K), other=0.0
        )
        low_NK = _weights(both & 15, scales + block * 4, n, N, BLOCK_N, _HALF)
        high_NK = _weights(both >> 4, scales + block * 4 + 2, n, N, BLOCK_N, _HALF)
        sums_NM = tl.dot(low_NK.to(low_KM.dtype), low_KM, sums_NM)
        sums_NM = tl.dot(high_NK.to(high_KM.dtype), high_KM, sums_NM)
    if PARTIAL:
        finish(sums_NM, None, None, out_ptr + split.to(tl.int64) * M * N, n, m, M, N, 0)
    else:
        finish(sums_NM, bias_ptr, residual_ptr, out_ptr, n, m, M, N, residual_stride)


@triton.jit
def _merge(
    part_ptr,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    splits,
    stride_s,
    residual_stride,
    SIZE: tl.constexpr,
):
    n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(1)
    m = row + tl.arange(0, 1)
    parts = part_ptr + row.to(tl.int64) * N + n
    sums = tl.zeros((SIZE,), part_ptr.dtype.element_ty)
    for _ in range(splits):
        sums += tl.load(parts, mask=n < N, other=0)
        parts += stride_s
    out = sums.to(tl.float32)
    if scale_ptr is not None:
        out *= tl.load(scale_ptr + n, mask=n < N, other=0.0) * tl.load(x_scale_ptr + row)
    finish(out[:, None], bias_ptr, residual_ptr, out_ptr, n, m, M, N, residual_stride)


def _tile(
    features: int, rows: int, *, warps: int, stages: int, inputs: int | None = None
) -> Config:
    sizes = {"BLOCK_N": features, "BLOCK_M": rows} | ({} if inputs is None else {"BLOCK_K": inputs})
    return Config(warps=warps, stages=stages, constants=sizes)


_MERGE = GpuKernel(_merge, Config(warps=4), Config(warps=2))
_INT8_FEW = GpuKernel(
    _int8_linear,
    _tile(64, MIN_ROWS, inputs=128, warps=4, stages=4),
    _tile(32, MIN_ROWS, inputs=128, warps=4, stages=5),
    _tile(128, MIN_ROWS, inputs=128, warps=4, stages=3),
)
_INT8_MANY = GpuKernel(
    _int8_linear,
    _tile(128, 128, inputs=64, warps=8, stages=3),
    _tile(128, 64, inputs=128, warps=4, stages=3),
    _tile(64, 64, inputs=128, warps=4, stages=4),
)
_INT4_FEW = GpuKernel(
    _int4_linear,
    _tile(64, MIN_ROWS, warps=4, stages=4),
    _tile(128, MIN_ROWS, warps=8, stages=3),
)
_INT4_MANY = GpuKernel(
    _int4_linear,
    _tile(128, 64, warps=8, stages=3),
    _tile(64, 64, warps=4, stages=3),
)


# ------------------------------------------------------------------------------------------------------------ launchers
def int8_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
) -> Tensor:
    """Return the product `[M, N]` in x's type with int8 weights that are padded to whole blocks."""
    q_MK, x_scale_M = quantize_rows(x_MK, weight_NK.shape[1])
    out_MN = x_MK.new_empty(len(x_MK), len(weight_NK))
    return _int8_product(q_MK, x_scale_M, weight_NK, scale_N, bias_N, residual_MN, out_MN)


def _int8_product(
    q_MK: Tensor,
    x_scale_M: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    out_MN: Tensor,
) -> Tensor:
    rows, (features, padded) = len(q_MK), weight_NK.shape
    kernel = _INT8_FEW if rows <= MIN_ROWS else _INT8_MANY

    def launch(split: _Split, *ends: Tensor | None) -> None:
        sizes = (rows, features, padded, split.blocks * BLOCK, _stride(ends[1]))
        kernel(
            split.grid, q_MK, x_scale_M, weight_NK, scale_N, *ends, *sizes, PARTIAL=split.count > 1
        )

    split = _Split(rows, features, padded // BLOCK)
    return _multiply(launch, split, torch.int32, (x_scale_M, scale_N), bias_N, residual_MN, out_MN)


def int4_linear(
    x_MK: Tensor,
    weight_NB: Tensor,
    scale_NG: Tensor,
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
) -> Tensor:
    """Return the product `[M, N]` in x's type with nibbles and their groups' scales.

    The factors are multiplied in 16 bits; float32 rows are rounded to bfloat16.
    """
    (rows, inputs), (features, bytes_per_row) = x_MK.shape, weight_NB.shape
    narrow_MK = x_MK.bfloat16() if x_MK.dtype == torch.float32 else x_MK
    kernel = _INT4_FEW if rows <= MIN_ROWS else _INT4_MANY
    blocks = bytes_per_row * 2 // BLOCK

    def launch(split: _Split, *ends: Tensor | None) -> None:
        sizes = (
            rows,
            features,
            inputs,
            blocks,
            split.blocks,
            narrow_MK.stride(0),
            _stride(ends[1]),
        )
        kernel(split.grid, narrow_MK, weight_NB, scale_NG, *ends, *sizes, PARTIAL=split.count > 1)

    split, out_MN = _Split(rows, features, blocks), x_MK.new_empty(rows, features)
    return _multiply(launch, split, torch.float32, (None, None), bias_N, residual_MN, out_MN)


class _Split:
    """Split the inputs into `count` parts of `blocks` blocks each; the last part may have fewer.

    There are as many parts as keep a GPU busy. They depend on the sizes alone, so that no
    configuration changes a result.
    """

    def __init__(self, rows: int, features: int, blocks: int):
        self._rows, self._features = rows, features
        tiles = max(1, triton.cdiv(rows, 64) * triton.cdiv(features, 64))
        wanted = max(1, min(RESIDENT_PROGRAMS // tiles, blocks // MIN_SPLIT_BLOCKS))
        self.blocks = triton.cdiv(blocks, wanted)
        self.count = triton.cdiv(blocks, self.blocks)

    def grid(self, constants: Constants) -> tuple[int, ...]:
        tiles = (
            triton.cdiv(self._features, constants["BLOCK_N"]),
            triton.cdiv(self._rows, constants["BLOCK_M"]),
        )
        return (*tiles, self.count)


def _multiply(
    launch: Callable[..., None],
    split: _Split,
    kind: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None],
    bias_N: Tensor | None,
    residual_MN: Tensor | None,
    out_MN: Tensor,
) -> Tensor:
    """Launch once, or in parts whose sums of type `kind` are then added, scaled and rounded."""
    if split.count == 1:
        launch(split, bias_N, residual_MN, out_MN)
        return out_MN
    rows, features = out_MN.shape
    part_SMN = out_MN.new_empty(split.count, rows, features, dtype=kind)
    launch(split, None, None, part_SMN)
    sizes = (rows, features, split.count, part_SMN.stride(0), _stride(residual_MN))
    _MERGE(
        (triton.cdiv(features, 256), rows),
        part_SMN,
        *scales,
        bias_N,
        residual_MN,
        out_MN,
        *sizes,
        SIZE=256,
    )
    return out_MN


def _stride(x_MK: Tensor | None) -> int:
    return 0 if x_MK is None else x_MK.stride(0)


# -------------------------------------------------------------------------------------------------------------- samples
def samples() -> Iterator[LaunchSample]:
    """Yield one row and a prompt, with a small and with a large matrix, for the compiler."""
    for rows, features, inputs, dtype in (
        (1, 4096, 4096, torch.bfloat16),
        (1, 24576, 4096, torch.bfloat16),
        (512, 24576, 4096, torch.bfloat16),
        (16, 1000, 1000, torch.float16),
        (512, 24576, 4096, torch.float16),
    ):
        padded, whole = (
            triton.cdiv(inputs, BLOCK) * BLOCK,
            features == 24576,
        )  # smaller ones are split and merged
        label = f"{rows} x {inputs:,} to {features:,}, {dtype}"
        x_MK, residual_MN = (
            torch.zeros(rows, inputs, dtype=dtype),
            torch.zeros(rows, features, dtype=dtype),
        )
        ends = torch.zeros(features) if dtype == torch.float16 else None, residual_MN
        q_MK, weight_NK = (
            torch.zeros(rows, padded, dtype=torch.int8),
            torch.zeros(features, padded, dtype=torch.int8),
        )
        given = (q_MK, torch.zeros(rows), weight_NK, torch.zeros(features), *ends, residual_MN)
        yield LaunchSample(f"int8, {label}", partial(_int8_product, *given), mma=whole)
        weight_NB = torch.zeros(features, padded // 2, dtype=torch.uint8)
        scale_NG = torch.zeros(features, padded // GROUP, dtype=torch.bfloat16)
        yield LaunchSample(
            f"int4, {label}", partial(int4_linear, x_MK, weight_NB, scale_NG, *ends), mma=whole
        )
