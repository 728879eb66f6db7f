"""Guidance and a scheduler's step in Triton against the twins in float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.guidance import guided, guided_step, guided_step_torch, guided_torch
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 4, 8, 8), (1, 5, 3), (1, 4, 0, 8), (1, 3, 17, 23), (1,)]


def prediction(shape: tuple[int, ...]) -> torch.Tensor:
    """What a denoiser says unconditional text and with it, and what it says of others behind them: NaN."""
    numbers = torch.randn(2, *shape[1:], generator=torch.Generator().manual_seed(sum(shape)))
    return torch.cat([numbers, torch.full_like(numbers, float("nan"))])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_guided_steps(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    unconditional, conditional, *_ = prediction(shape).to(device, dtype).split(1)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        guided(unconditional, conditional, 2.5).double(),
        guided_torch(unconditional.double(), conditional.double(), 2.5),
        rtol=tolerance,
        atol=tolerance,
    )
    for kind in (dtype, torch.float32):
        sample = torch.ones(shape, device=device, dtype=kind) * 3
        out = guided_step(sample, unconditional, conditional, 2.5, 0.9, -0.3)
        due = guided_step_torch(
            sample.double(), unconditional.double(), conditional.double(), 2.5, 0.9, -0.3
        )
        assert out.dtype == kind
        torch.testing.assert_close(out.double(), due, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(1, 4, 2, 2)
    with refuses(KernelError, "conditional"):
        guided(x, x.long(), 1.0)
    with refuses(KernelError, "unconditional"):
        guided_step(x, x[:, :, 0], x, 1.0, 1.0, 1.0)
    with refuses(KernelError, "conditional"):
        guided(x, x.transpose(2, 3), 1.0)
