"""Quantize rows to 8 bits with a scale per row: a program per row.

The method is LLM.int8()'s (arXiv 2208.07339, section 2.1).

Shapes: M rows, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.codes import LARGEST, ROUNDS
from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample


@triton.jit
def _quantize_rows(x_ptr, q_ptr, scale_ptr, stride_m, K, padded, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    largest = tl.zeros((SIZE,), tl.float32)
    bad = tl.zeros((SIZE,), tl.int32)
    for start in range(0, K, SIZE):
        x = tl.load(x_ptr + row * stride_m + start + at, mask=start + at < K, other=0.0).to(
            tl.float32
        )
        finite = tl.abs(x) <= LARGEST
        largest = tl.maximum(largest, tl.where(finite, tl.abs(x), 0.0))
        bad += tl.where(finite, 0, 1)
    scale = tl.max(largest, 0) / 127
    inverse = tl.where(scale >= 1.2e-38, 1 / tl.maximum(scale, 1.2e-38), 0.0)
    tl.store(scale_ptr + row, tl.where(tl.sum(bad, 0) > 0, float("nan"), scale))
    for start in range(0, padded, SIZE):
        x = tl.load(x_ptr + row * stride_m + start + at, mask=start + at < K, other=0.0).to(
            tl.float32
        )
        x = tl.where(tl.abs(x) <= LARGEST, x, 0.0)
        rounded = x * inverse + ROUNDS - ROUNDS
        tl.store(q_ptr + row * padded + start + at, rounded.to(tl.int8), mask=start + at < padded)


_QUANTIZE = GpuKernel(_quantize_rows, Config(warps=4), Config(warps=8))


def quantize_rows(x_MK: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Return int8 `[M, padded]`, zero after K, and a float32 scale per row.

    The scale is NaN for a row with a value that is not finite.
    """
    rows, inputs = x_MK.shape
    q_MK, scale_M = (
        x_MK.new_empty(rows, padded, dtype=torch.int8),
        x_MK.new_empty(rows, dtype=torch.float32),
    )
    size = min(triton.next_power_of_2(padded), 4096)
    _QUANTIZE((rows,), x_MK, q_MK, scale_M, x_MK.stride(0), inputs, padded, SIZE=size)
    return q_MK, scale_M


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        label = f"rows of 4,096, {dtype}"
        yield LaunchSample(label, partial(quantize_rows, torch.zeros(2, 4096, dtype=dtype), 4096))
    yield LaunchSample(
        "rows of 1,000, bfloat16",
        partial(quantize_rows, torch.zeros(2, 1000, dtype=torch.bfloat16), 1024),
    )
