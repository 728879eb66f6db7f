"""Apply guidance and a scheduler's step in one pass over the denoiser's predictions.

The coefficients are arguments of the launch.
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
def _guided_step(
    sample_ptr,
    unconditional_ptr,
    conditional_ptr,
    out_ptr,
    scale,
    sample_factor,
    output_factor,
    elements,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    unconditional = tl.load(unconditional_ptr + at, mask=mask, other=0.0).to(tl.float32)
    conditional = tl.load(conditional_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = unconditional + scale * (conditional - unconditional)
    if STEP:
        out = (
            sample_factor * tl.load(sample_ptr + at, mask=mask, other=0.0).to(tl.float32)
            + output_factor * out
        )
    tl.store(out_ptr + at, out, mask=mask)


# Latents are small: blocks of few elements, so that all of a GPU is used.
_STEP = GpuKernel(
    _guided_step,
    Config(warps=2, constants={"BLOCK": 512}),
    Config(warps=4, constants={"BLOCK": 1024}),
    Config(warps=8, constants={"BLOCK": 4096}),
)


def guided(unconditional: Tensor, conditional: Tensor, scale: float) -> Tensor:
    """Compute `motet_kernels.guidance.guided` with Triton."""
    return _launch(unconditional, unconditional, conditional, scale, 0.0, 1.0, step=False)


def guided_step(
    sample: Tensor,
    unconditional: Tensor,
    conditional: Tensor,
    scale: float,
    sample_factor: float,
    output_factor: float,
) -> Tensor:
    """Compute `motet_kernels.guidance.guided_step` with Triton."""
    return _launch(
        sample, unconditional, conditional, scale, sample_factor, output_factor, step=True
    )


def _launch(
    sample: Tensor,
    unconditional: Tensor,
    conditional: Tensor,
    scale: float,
    sample_factor: float,
    output_factor: float,
    *,
    step: bool,
) -> Tensor:
    out = torch.empty_like(sample)
    elements = sample.numel()
    _STEP(
        lambda sizes: (triton.cdiv(elements, sizes["BLOCK"]),),
        *(sample, unconditional, conditional, out),
        *(float(scale), float(sample_factor), float(output_factor), elements),
        STEP=step,
    )
    return out


def samples() -> Iterator[LaunchSample]:
    """Yield latents of SDXL and of SD3 at 1024 x 1024 pixels.

    Some schedulers keep them in a wider type than the denoiser's output.
    """
    for dtype, channels, wider in (
        (torch.bfloat16, 16, torch.bfloat16),
        (torch.float16, 4, torch.float16),
        (torch.float32, 4, torch.float32),
        (torch.bfloat16, 4, torch.float32),
    ):
        prediction = torch.empty(1, channels, 128, 128, dtype=dtype)
        sample = prediction.to(wider)
        label = f"{channels} x 128², {dtype} of {wider}"
        yield LaunchSample(
            label, partial(guided_step, sample, prediction, prediction, 7.5, 1.0, -0.1)
        )
        if wider == dtype:
            yield LaunchSample(f"{label}, no step", partial(guided, prediction, prediction, 7.5))
