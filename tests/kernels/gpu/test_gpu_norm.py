"""Norms in Triton against the twins in float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.gpu import norm as kernels
from motet_kernels.norm import add_rms_norm, layer_norm, layer_norm_torch, rms_norm, rms_norm_torch
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def poisoned(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Rows of x inside of larger ones, with NaN all around."""
    rows, width = x.shape
    held = torch.full((rows + 2, width + 5), torch.nan, device=device, dtype=dtype)
    held[1 : rows + 1, 2 : width + 2] = x.to(device, dtype)
    return held[1 : rows + 1, 2 : width + 2]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("width", [1, 5, 64, 100])
@pytest.mark.parametrize("rows", [0, 1, 3, 35])
def test_norms_of_strided_rows(
    device: torch.device, rows: int, width: int, dtype: torch.dtype
) -> None:
    """Narrow rows share a program, 35 of 64 more than one."""
    compare(poisoned(randn(rows, width) * 3 + 1, device, dtype), dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("width", [1500, 3000, 20000])
def test_norms_of_rows_wider_than_a_small_tile_and_than_all(
    device: torch.device, width: int, dtype: torch.dtype
) -> None:
    compare(poisoned(randn(2, width) * 3 + 1, device, dtype), dtype)


def compare(x: torch.Tensor, dtype: torch.dtype) -> None:
    width, device, tolerance = x.shape[1], x.device, TOLERANCES[dtype]
    weight, bias = randn(width).to(device), randn(width + 1)[1:].to(device)
    wide, weights = x.double(), (weight.double(), bias.double())
    normed = rms_norm(x, weight, 1e-6, 1.0), layer_norm(x, weight, bias, 1e-5)
    expected = rms_norm_torch(wide, weights[0], 1e-6, 1.0), layer_norm_torch(wide, *weights, 1e-5)
    for out, due in zip(normed, expected, strict=True):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), due, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("shape", [(2, 0, 8), (1, 3, 100), (2, 18000)], ids=str)
def test_sums_are_rounded_and_then_normed(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual = (randn(*shape[:-1], shape[-1] + n).to(device, dtype)[..., n:] for n in (0, 3))
    weight = randn(shape[-1]).to(device)
    total, normed = add_rms_norm(x, residual, weight, 1e-6, 0.5)
    assert total.shape == normed.shape == shape
    assert torch.equal(total, x + residual)
    expected = rms_norm_torch(total.double(), weight.double(), 1e-6, 0.5)
    torch.testing.assert_close(
        normed.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


def test_a_row_s_bits_do_not_depend_on_its_company(device: torch.device) -> None:
    x, weight = randn(40, 70).to(device), randn(70).to(device)
    whole = (
        rms_norm(x, weight, 1e-6),
        layer_norm(x, weight, weight, 1e-6),
        *add_rms_norm(x, x, weight, 1e-6),
    )
    for at in (slice(0, 1), slice(3, 39)):
        part = x[at]
        parts = (
            rms_norm(part, weight, 1e-6),
            layer_norm(part, weight, weight, 1e-6),
            *add_rms_norm(part, part, weight, 1e-6),
        )
        assert all(torch.equal(one, both[at]) for one, both in zip(parts, whole, strict=True))


def test_every_configuration_gives_the_same_to_rounding(device: torch.device) -> None:
    x, weight = randn(3, 2500).to(device), randn(2500).to(device)
    expected = rms_norm_torch(x.double(), weight.double(), 1e-6, 0.0)
    for config in list(kernels._RMS.candidates({"BLOCK": 4096}))[1:]:
        out = torch.full_like(x, torch.nan)
        tensors, strides = (x, x, weight, out, out), (x.stride(0), x.stride(0))
        constants = {"ADDS": False, "BLOCK": 4096}
        kernels._RMS.run(
            config, kernels._grid(3), *tensors, 3, *strides, 2500, 1e-6, 0.0, **constants
        )
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(16, device=device)
    with refuses(KernelError, "weight_C"):
        rms_norm(x, weight, 1e-6)
    with refuses(KernelError, "weight_C"):
        rms_norm(x, weight[::2], 1e-6)
    with refuses(KernelError, "weight_C"):
        rms_norm(x, weight[:8].to("meta"), 1e-6)
    with refuses(KernelError, "residual"):
        add_rms_norm(x, x.half(), weight[:8], 1e-6)
    with refuses(KernelError, "x"):
        rms_norm(x.double(), weight[:8], 1e-6)
