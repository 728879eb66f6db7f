"""Compute RMS norm, also of a sum, and layer norm; rows that fit into registers are read once.

A program takes as many short rows as fit its tile. Which configuration ships depends on the width
of a row alone, and so do the bits of its result.

Shapes: M rows, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample

WIDEST = 16384  # channels of a row that is kept in registers
_CHUNK = 4096  # channels of a longer row at a time


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, M, stride_m, residual_stride_m, C, eps, offset,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (at < C)
    x = tl.load(x_ptr + rows * stride_m + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        residual = tl.load(residual_ptr + rows * residual_stride_m + at, mask=mask, other=0.0).to(
            tl.float32
        )
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows * C + at, total, mask=mask)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < C, other=0.0) + offset
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / C + eps)
    tl.store(out_ptr + rows * C + at, x * scale * weight, mask=mask)


@triton.jit
def _rms_norm_wide(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, stride_m, residual_stride_m, C, eps, offset,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x_ptr += row * stride_m
    residual_ptr += row * residual_stride_m
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        mask = start + at < C
        x = tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
        if ADDS:
            residual = tl.load(residual_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
            total = (x + residual).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * C + start + at, total, mask=mask)
            x = total.to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    for start in range(0, C, BLOCK):
        mask = start + at < C
        x = tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
        if ADDS:  # added again: other threads see the stored sums only after a barrier
            residual = tl.load(residual_ptr + start + at, mask=mask, other=0.0).to(tl.float32)
            x = (x + residual).to(sum_ptr.dtype.element_ty).to(tl.float32)
        weight = tl.load(weight_ptr + start + at, mask=mask, other=0.0) + offset
        tl.store(out_ptr + row * C + start + at, x * scale * weight, mask=mask)


@triton.jit
def _layer_norm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, stride_m, C, eps, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M) & (at < C)
    x = tl.load(x_ptr + rows * stride_m + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(mask, x - tl.sum(x, 1, keep_dims=True) / C, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / C + eps)
    weight = tl.load(weight_ptr + at, mask=at < C, other=0.0)
    bias = tl.load(bias_ptr + at, mask=at < C, other=0.0)
    tl.store(out_ptr + rows * C + at, x * scale * weight + bias, mask=mask)


@triton.jit
def _layer_norm_wide(x_ptr, weight_ptr, bias_ptr, out_ptr, stride_m, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x_ptr += row * stride_m
    totals = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        totals += tl.load(x_ptr + start + at, mask=start + at < C, other=0.0).to(tl.float32)
    mean = tl.sum(totals, 0) / C
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        mask = start + at < C
        x = tl.where(
            mask, tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32) - mean, 0.0
        )
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / C + eps)
    for start in range(0, C, BLOCK):
        mask = start + at < C
        x = tl.load(x_ptr + start + at, mask=mask, other=0.0).to(tl.float32) - mean
        weight = tl.load(weight_ptr + start + at, mask=mask, other=0.0)
        bias = tl.load(bias_ptr + start + at, mask=mask, other=0.0)
        tl.store(out_ptr + row * C + start + at, x * scale * weight + bias, mask=mask)


# A thread holds 16 or 32 elements of a tile, which leaves enough programs on a multiprocessor to
# hide its loads.
_TILES = tuple(
    Config(warps=warps, constants={"TILE": tile})
    for warps, tile in ((4, 2048), (4, 4096), (8, 4096), (8, 8192), (16, 8192), (16, WIDEST))
)
_LOOPS = (Config(warps=8), Config(warps=16))


def _fits(constants: Constants) -> bool:
    return bool(constants["BLOCK"] <= constants["TILE"])


_RMS = GpuKernel(_rms_norm, *_TILES, fits=_fits)
_RMS_WIDE = GpuKernel(_rms_norm_wide, *_LOOPS)
_LAYER = GpuKernel(_layer_norm, *_TILES, fits=_fits)
_LAYER_WIDE = GpuKernel(_layer_norm_wide, *_LOOPS)


def rms_norm(x_MC: Tensor, weight_C: Tensor, eps: float, offset: float) -> Tensor:
    """Compute `motet_kernels.norm.rms_norm` of rows with Triton."""
    out_MC = x_MC.new_empty(x_MC.shape)
    _rms(x_MC, x_MC, weight_C, out_MC, out_MC, eps, offset, adds=False)
    return out_MC


def add_rms_norm(
    x_MC: Tensor, residual_MC: Tensor, weight_C: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Compute `motet_kernels.norm.add_rms_norm` of rows with Triton."""
    sum_MC, out_MC = x_MC.new_empty(x_MC.shape), x_MC.new_empty(x_MC.shape)
    _rms(x_MC, residual_MC, weight_C, sum_MC, out_MC, eps, offset, adds=True)
    return sum_MC, out_MC


def _rms(
    x_MC: Tensor,
    residual_MC: Tensor,
    weight_C: Tensor,
    sum_MC: Tensor,
    out_MC: Tensor,
    eps: float,
    offset: float,
    *,
    adds: bool,
) -> None:
    rows, channels = x_MC.shape
    tensors, strides = (
        (x_MC, residual_MC, weight_C, sum_MC, out_MC),
        (x_MC.stride(0), residual_MC.stride(0)),
    )
    if channels > WIDEST:
        _RMS_WIDE((rows,), *tensors, *strides, channels, eps, offset, ADDS=adds, BLOCK=_CHUNK)
        return
    block = triton.next_power_of_2(channels)
    _RMS(_grid(rows), *tensors, rows, *strides, channels, eps, offset, ADDS=adds, BLOCK=block)


def layer_norm(x_MC: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    """Compute `motet_kernels.norm.layer_norm` of rows with Triton."""
    (rows, channels), out_MC = x_MC.shape, x_MC.new_empty(x_MC.shape)
    tensors = (x_MC, weight_C, bias_C, out_MC)
    if channels > WIDEST:
        _LAYER_WIDE((rows,), *tensors, x_MC.stride(0), channels, eps, BLOCK=_CHUNK)
        return out_MC
    block = triton.next_power_of_2(channels)
    _LAYER(_grid(rows), *tensors, rows, x_MC.stride(0), channels, eps, BLOCK=block)
    return out_MC


def _grid(rows: int) -> partial[tuple[int]]:
    return partial(_programs, rows)


def _programs(rows: int, constants: Constants) -> tuple[int]:
    return (triton.cdiv(rows, constants["TILE"] // constants["BLOCK"]),)


def samples() -> Iterator[LaunchSample]:
    """Yield hidden sizes of models, normed heads, and rows that are too long for registers."""
    sizes = [(width, torch.bfloat16) for width in (128, 2048, 4096, 8192, 16384, 32768)]
    for width, dtype in [*sizes, (4096, torch.float16), (4096, torch.float32)]:
        x_MC, weight_C = torch.zeros(2, width, dtype=dtype), torch.zeros(width)
        label = f"rows of {width:,}, {dtype}"
        yield LaunchSample(label, partial(rms_norm, x_MC, weight_C, 1e-6, 0.0))
        yield LaunchSample(f"sums, {label}", partial(add_rms_norm, x_MC, x_MC, weight_C, 1e-6, 0.0))
        yield LaunchSample(label, partial(layer_norm, x_MC, weight_C, weight_C, 1e-6))
