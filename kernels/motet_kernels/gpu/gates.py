"""Compute activations and gated activations; each element is read once.

Shapes: M rows, C channels of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.gpu.launch import Config, Constants, GpuKernel, LaunchSample

_WIDEST = 1024  # channels of a row in a program; shorter rows share a program


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "sigmoid":
        out = 1 / (1 + tl.exp(-x))
    elif KIND == "silu":
        out = x / (1 + tl.exp(-x))
    elif KIND == "softplus":
        # max(x, 0) + log(1 + y), y = e^-|x|; the logarithm as 2 atanh(y / (2 + y)), whose argument
        # is at most a third, so that seven terms of its series are exact to float32, also for
        # tiny y.
        y = tl.exp(-tl.abs(x))
        z = y / (2 + y)
        w = z * z
        series = 1 / 9 + w * (1 / 11 + w * (1 / 13))
        series = 1 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * series)))
        out = tl.where(x > 0, x, 0.0) + 2 * z * series
        out = tl.where(x == x, out, x)
    elif KIND == "gelu":
        out = x * 0.5 * (1 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh u) / 2 is sigmoid(2u).
        twice = x * (1.5957691216057308 + 0.07135481282553543 * x * x)
        out = x / (1 + tl.exp(-twice))
    return out


@triton.jit
def _gate(
    x_ptr, out_ptr, M, C, stride_m, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    ROWS: tl.constexpr = TILE // BLOCK
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    at = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (rows < M) & (at < C)
    x = tl.load(x_ptr + rows * stride_m + at, mask=mask, other=0.0).to(tl.float32)
    out = _activated(x, KIND)
    if GATED:
        out *= tl.load(x_ptr + rows * stride_m + C + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * C + at, out, mask=mask)


_GATE = GpuKernel(
    _gate,
    Config(warps=4, constants={"TILE": 1024}),
    Config(warps=8, constants={"TILE": 2048}),
    Config(warps=4, constants={"TILE": 2048}),
)


def activated(x_MC: Tensor, kind: str) -> Tensor:
    """Compute the activation of `motet_kernels.gates` named `kind` with Triton.

    The names are sigmoid, silu, softplus, gelu and gelu_tanh.
    """
    return _run(x_MC, x_MC.shape[1], kind, gated=False)


def gated(x_MX: Tensor, kind: str) -> Tensor:
    """Compute `motet_kernels.gates.gated` with Triton, of rows of C gates followed by C inputs."""
    return _run(x_MX, x_MX.shape[1] // 2, kind, gated=True)


def _run(x: Tensor, channels: int, kind: str, *, gated: bool) -> Tensor:
    out_MC = x.new_empty(len(x), channels)
    block = min(triton.next_power_of_2(max(channels, 1)), _WIDEST)
    grid = partial(_programs, *out_MC.shape)
    _GATE(grid, x, out_MC, *out_MC.shape, x.stride(0), KIND=kind, GATED=gated, BLOCK=block)
    return out_MC


def _programs(rows: int, channels: int, constants: Constants) -> tuple[int, int]:
    block = constants["BLOCK"]
    return triton.cdiv(rows, constants["TILE"] // block), triton.cdiv(channels, block)


def samples() -> Iterator[LaunchSample]:
    """Yield the MLPs of language models, and the activations of recurrent layers and encoders."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for kind in ("silu", "gelu_tanh"):
            x_MX = torch.zeros(2, 2 * 12288, dtype=dtype)
            yield LaunchSample(
                f"{kind} of 12,288 times as many, {name}", partial(gated, x_MX, kind)
            )
    for kind in ("sigmoid", "silu", "softplus", "gelu", "gelu_tanh"):
        x_MC = torch.zeros(2, 8192)
        yield LaunchSample(f"{kind} of 8,192, float32", partial(activated, x_MC, kind))
    yield LaunchSample(
        "softplus of 64, float32", partial(activated, torch.zeros(2, 64), "softplus")
    )
    yield LaunchSample(
        "gelu of 8,192, bfloat16",
        partial(activated, torch.zeros(2, 8192, dtype=torch.bfloat16), "gelu"),
    )
