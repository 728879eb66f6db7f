"""Compute adaptive layer norm and gated addition.

The norm has a program per token, which it reads once, the addition a program per piece of a token.
Factors, shifts and gates are read again for every token: a picture's row of them stays in the
caches.

Shapes: B pictures, S tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample


@triton.jit
def _modulated_norm(
    x_ptr,
    weight_ptr,
    bias_ptr,
    factor_ptr,
    shift_ptr,
    out_ptr,
    stride_b,
    stride_s,
    factor_stride,
    shift_stride,
    S,
    C,
    eps,
    BLOCK: tl.constexpr,
):
    token, picture = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < C
    x = tl.load(x_ptr + picture * stride_b + token * stride_s + at, mask=mask, other=0.0).to(
        tl.float32
    )
    x = tl.where(mask, x - tl.sum(x, 0) / C, 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    if weight_ptr is not None:
        out *= tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        out *= tl.load(factor_ptr + picture * factor_stride + at, mask=mask, other=0.0).to(
            tl.float32
        )
    if shift_ptr is not None:
        out += tl.load(shift_ptr + picture * shift_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + (picture * S + token) * C + at, out, mask=mask)


@triton.jit
def _gated_add(
    residual_ptr,
    gate_ptr,
    x_ptr,
    out_ptr,
    residual_stride_b,
    residual_stride_s,
    gate_stride,
    stride_b,
    stride_s,
    S,
    C,
    BLOCK: tl.constexpr,
):
    token, picture = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = at < C
    residual_ptr += picture * residual_stride_b + token * residual_stride_s
    residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + picture * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + picture * stride_b + token * stride_s + at, mask=mask, other=0.0).to(
        tl.float32
    )
    tl.store(out_ptr + (picture * S + token) * C + at, residual + gate * x, mask=mask)


_NORM = GpuKernel(_modulated_norm, Config(warps=4), Config(warps=8), Config(warps=16))
_ADD = GpuKernel(
    _gated_add,
    Config(warps=4, constants={"BLOCK": 1024}),
    Config(warps=4, constants={"BLOCK": 2048}),
    Config(warps=8, constants={"BLOCK": 4096}),
)


def modulated_norm(
    x_BSC: Tensor,
    eps: float,
    factor_B1C: Tensor | None,
    shift_B1C: Tensor | None,
    weight_C: Tensor | None,
    bias_C: Tensor | None,
) -> Tensor:
    """Compute `motet_kernels.modulate.modulated_norm` with Triton."""
    pictures, tokens, channels = x_BSC.shape
    out_BSC = x_BSC.new_empty(pictures, tokens, channels)
    _NORM(
        (tokens, pictures),
        *(x_BSC, weight_C, bias_C, factor_B1C, shift_B1C, out_BSC),
        *x_BSC.stride()[:2],
        *(_stride(factor_B1C), _stride(shift_B1C)),
        *(tokens, channels, eps),
        BLOCK=triton.next_power_of_2(channels),
    )
    return out_BSC


def gated_add(residual_BSC: Tensor, gate_B1C: Tensor, x_BSC: Tensor) -> Tensor:
    """Compute `motet_kernels.modulate.gated_add` with Triton."""
    pictures, tokens, channels = x_BSC.shape
    out_BSC = residual_BSC.new_empty(pictures, tokens, channels)
    _ADD(
        lambda sizes: (tokens, pictures, triton.cdiv(channels, sizes["BLOCK"])),
        *(residual_BSC, gate_B1C, x_BSC, out_BSC),
        *residual_BSC.stride()[:2],
        *(_stride(gate_B1C), *x_BSC.stride()[:2]),
        *(tokens, channels),
    )
    return out_BSC


def _stride(row_B1C: Tensor | None) -> int:
    """Return the stride from one picture's row to the next one's; 0 if all share one."""
    return 0 if row_B1C is None or row_B1C.shape[0] == 1 else row_B1C.stride(0)


def samples() -> Iterator[LaunchSample]:
    """Yield blocks of SD3 (1,536 channels), PixArt (1,152) and Flux (3,072).

    Their modulations are slices of one matrix.
    """
    for dtype, channels in ((torch.bfloat16, 3072), (torch.float16, 1536), (torch.float32, 1152)):
        x_BSC = torch.zeros(2, 3, channels, dtype=dtype)
        shift, scale, gate, *_ = torch.zeros(2, 1, 6 * channels, dtype=dtype).chunk(6, dim=2)
        weight_C = torch.zeros(channels, dtype=dtype)
        label = f"tokens of {channels:,}, {dtype}"
        yield LaunchSample(label, partial(modulated_norm, x_BSC, 1e-6, scale, shift, None, None))
        yield LaunchSample(
            f"{label}, not modulated",
            partial(modulated_norm, x_BSC, 1e-6, None, None, weight_C, weight_C),
        )
        yield LaunchSample(label, partial(gated_add, x_BSC, gate, x_BSC))
