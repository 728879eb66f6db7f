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

from motet_kernels.gpu.launch import Config, GpuKernel, Sample


@triton.jit
def _guided_step(
    sample_ptr,
    without_ptr,
    with_ptr,
    out_ptr,
    scale,
    keep,
    change,
    elements,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seen = at < elements
    without = tl.load(without_ptr + at, mask=seen, other=0.0).to(tl.float32)
    with_text = tl.load(with_ptr + at, mask=seen, other=0.0).to(tl.float32)
    out = without + scale * (with_text - without)
    if STEP:
        out = keep * tl.load(sample_ptr + at, mask=seen, other=0.0).to(tl.float32) + change * out
    tl.store(out_ptr + at, out, mask=seen)


# Latents are small: blocks of few elements, so that all of a GPU is used.
_STEP = GpuKernel(
    _guided_step,
    Config(warps=2, constants={"BLOCK": 512}),
    Config(warps=4, constants={"BLOCK": 1024}),
    Config(warps=8, constants={"BLOCK": 4096}),
)


def guided(without: Tensor, with_text: Tensor, scale: float) -> Tensor:
    """Compute `motet_kernels.guidance.guided` with Triton."""
    return _launched(without, without, with_text, scale, 0.0, 1.0, step=False)


def guided_step(
    sample: Tensor, without: Tensor, with_text: Tensor, scale: float, keep: float, change: float
) -> Tensor:
    """Compute `motet_kernels.guidance.guided_step` with Triton."""
    return _launched(sample, without, with_text, scale, keep, change, step=True)


def _launched(
    sample: Tensor,
    without: Tensor,
    with_text: Tensor,
    scale: float,
    keep: float,
    change: float,
    *,
    step: bool,
) -> Tensor:
    out = torch.empty_like(sample)
    elements = sample.numel()
    _STEP(
        lambda sizes: (triton.cdiv(elements, sizes["BLOCK"]),),
        *(sample, without, with_text, out),
        *(float(scale), float(keep), float(change), elements),
        STEP=step,
    )
    return out


def samples() -> Iterator[Sample]:
    """Yield latents of SDXL and of SD3 at 1024 x 1024 pixels.

    Some schedulers keep them in a wider type than the denoiser's output.
    """
    for dtype, channels, wider in (
        (torch.bfloat16, 16, torch.bfloat16),
        (torch.float16, 4, torch.float16),
        (torch.float32, 4, torch.float32),
        (torch.bfloat16, 4, torch.float32),
    ):
        said = torch.empty(1, channels, 128, 128, dtype=dtype)
        sample = said.to(wider)
        label = f"{channels} x 128², {dtype} of {wider}"
        yield Sample(label, partial(guided_step, sample, said, said, 7.5, 1.0, -0.1))
        if wider == dtype:
            yield Sample(f"{label}, no step", partial(guided, said, said, 7.5))
