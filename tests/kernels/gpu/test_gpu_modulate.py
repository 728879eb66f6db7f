"""Adaptive layer norm and gated addition in Triton against the twins in float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.modulate import gated_add, gated_add_torch, modulated_norm, modulated_norm_torch
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def parts(pictures: int, width: int) -> torch.Tensor:
    """Rows as models make them: parts of one wide matrix, two for each picture here."""
    return randn(pictures, 1, 2 * width)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    "given", ["all", "modulated", "weights", "nothing", "factor", "one row for all"]
)
@pytest.mark.parametrize(
    ("pictures", "tokens", "width"), [(2, 3, 5), (1, 1, 64), (3, 2, 1), (0, 2, 4), (2, 0, 4)]
)
def test_norms(
    device: torch.device, pictures: int, tokens: int, width: int, given: str, dtype: torch.dtype
) -> None:
    wide = torch.full((pictures, tokens, width + 3), float("nan"))
    wide[:, :, 1:-2] = randn(pictures, tokens, width) * 3 + 1
    x = wide.to(device, dtype)[:, :, 1:-2]
    rows = 1 if given == "one row for all" else pictures
    factor, shift = parts(rows, width).to(device, dtype).chunk(2, dim=2)
    weight, bias = randn(width).to(device, dtype), randn(width + 1)[1:].to(device)
    modulated = {"factor_B1C": factor, "shift_B1C": shift}
    weighted = {"weight_C": weight, "bias_C": bias}
    chosen: dict[str, torch.Tensor] = {
        "all": {**modulated, **weighted},
        "modulated": modulated,
        "one row for all": modulated,
        "weights": weighted,
        "nothing": {},
        "factor": {"factor_B1C": factor},
    }[given]
    out = modulated_norm(x, 1e-5, **chosen)
    due = modulated_norm_torch(
        x.double(), 1e-5, **{name: part.double() for name, part in chosen.items()}
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), due, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("rows", ["own", "shared"])
@pytest.mark.parametrize(
    ("pictures", "tokens", "width"), [(2, 3, 5), (1, 1, 1100), (3, 2, 1), (2, 0, 4)]
)
def test_gated_additions(
    device: torch.device, pictures: int, tokens: int, width: int, rows: str, dtype: torch.dtype
) -> None:
    residual = randn(tokens, pictures, width).to(device, dtype).transpose(0, 1)
    x = randn(pictures, tokens, width + 2).to(device, dtype)[:, :, 2:]
    gate = parts(pictures if rows == "own" else 1, width).to(device, dtype).chunk(2, dim=2)[1]
    out = gated_add(residual, gate, x)
    due = gated_add_torch(residual.double(), gate.double(), x.double())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), due, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_what_does_not_fit_is_refused() -> None:
    x, row = torch.zeros(2, 3, 4), torch.zeros(2, 1, 4)
    with refuses(KernelError, "factor_B1C"):
        modulated_norm(x, 1e-5, torch.zeros(3, 1, 4), row)
    with refuses(KernelError, "shift_B1C"):
        modulated_norm(x, 1e-5, row, torch.zeros(2, 1, 5))
    with refuses(KernelError, "weight_C"):
        modulated_norm(x, 1e-5, weight_C=torch.zeros(1, 4))
    with refuses(KernelError, "x_BSC"):
        modulated_norm(x[0], 1e-5)
    with refuses(KernelError, "x_BSC"):
        gated_add(x, row, x[:, :2])
    with refuses(KernelError, "gate_B1C"):
        gated_add(x, x, x)
