"""Norms in Triton against the twins in float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.norm import layer_norm, layer_norm_torch, rms_norm, rms_norm_torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("width", [1, 5, 64, 100])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_norms_of_strided_rows(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    x = (randn(rows, width + 3) * 3 + 1).to(device, dtype)[:, :width]
    weight, bias = randn(width).to(device), randn(width + 1)[1:].to(device)
    wide, tolerance = x.double(), TOLERANCES[dtype]
    normed = rms_norm(x, weight, 1e-6, 1.0), layer_norm(x, weight, bias, 1e-5)
    expected = (
        rms_norm_torch(wide, weight.double(), 1e-6, 1.0),
        layer_norm_torch(wide, weight.double(), bias.double(), 1e-5),
    )
    for out, due in zip(normed, expected, strict=True):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), due, rtol=tolerance, atol=tolerance)
