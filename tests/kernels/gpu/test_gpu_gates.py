"""Activations in Triton against torch in float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels import gates
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

KINDS = ("sigmoid", "silu", "softplus", "gelu", "gelu_tanh")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
VALUES = torch.cat(
    (torch.linspace(-100, 100, 2001), torch.logspace(-30, 1, 250), -torch.logspace(-30, 1, 250))
)


def poisoned(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    held = torch.full((rows, width + 6), torch.nan, device=device, dtype=dtype)
    numbers = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + width)) * 4
    held[:, 3 : width + 3] = numbers.to(device, dtype)
    return held[:, 3 : width + 3]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(device: torch.device, kind: str) -> None:
    out = getattr(gates, kind)(VALUES.to(device)[None])
    expected = gates.activated_torch(VALUES.double()[None], kind).to(device)
    if kind.startswith("gelu"):  # its error grows with the value
        assert bool(
            ((out.double() - expected).abs() <= 1e-6 * VALUES.abs().to(device) + 1e-36).all()
        )
    else:
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize("kind", ["sigmoid", "silu", "softplus"])
def test_special_values(device: torch.device, kind: str) -> None:
    x_MC = torch.tensor([[torch.inf, torch.nan, 0.0, -0.0, 1e30, -1e30]])
    out = getattr(gates, kind)(x_MC.to(device)).cpu()
    torch.testing.assert_close(out, gates.activated_torch(x_MC, kind), equal_nan=True)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 97), (35, 40), (2, 1100)])
def test_strided_rows_of_every_type(
    device: torch.device, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, tolerance = poisoned(rows, 2 * width, device, dtype), TOLERANCES[dtype]
    for kind in ("silu", "gelu_tanh"):
        out = gates.gated(x, kind)
        assert out.dtype == dtype
        assert out.shape == (rows, width)
        torch.testing.assert_close(
            out.double(), gates.gated_torch(x.double(), kind), rtol=tolerance, atol=tolerance
        )
    for kind in KINDS:
        out = getattr(gates, kind)(x)
        assert out.dtype == dtype
        torch.testing.assert_close(
            out.double(), gates.activated_torch(x.double(), kind), rtol=tolerance, atol=tolerance
        )


def test_gated_rows_of_more_dimensions(device: torch.device) -> None:
    x = poisoned(6, 48, device, torch.float32).unflatten(0, (2, 3))
    torch.testing.assert_close(gates.gated(x, "silu"), gates.gated_torch(x, "silu"))
    across = x.transpose(0, 2)
    torch.testing.assert_close(
        gates.gated(across[..., :2], "silu"), gates.gated_torch(across[..., :2], "silu")
    )


def test_wrong_arguments_are_named(device: torch.device) -> None:
    with refuses(KernelError, "x"):
        gates.gated(torch.zeros(2, 4, dtype=torch.int32, device=device), "silu")
    with refuses(KernelError, "x_MC"):
        gates.silu(torch.zeros(2, 4, dtype=torch.float64, device=device))
