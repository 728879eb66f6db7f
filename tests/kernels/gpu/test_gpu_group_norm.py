"""Group norm in Triton against the twin in float64."""

from __future__ import annotations

import pytest
import torch

from motet_kernels.group_norm import group_norm, group_norm_torch
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SHAPES = [
    (2, 6, 7),
    (1, 4, 1),
    (3, 6, 2, 5),
    (2, 70, 3, 3),
    (1, 2, 3, 4, 5),
    (1, 2, 24, 25),
    (2, 10, 8, 8),
]
ORDERS = ["planes", "channels last", "a part of wider ones"]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def laid_out(x: torch.Tensor, order: str) -> torch.Tensor:
    """The same numbers in another order, and NaN around them."""
    if order == "planes":
        return x.contiguous()
    if order == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    wide = torch.full(
        (*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device
    )
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_group_norms(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], order: str
) -> None:
    x = laid_out((randn(*shape) * 3 + 20).to(device, dtype), order)
    channels, silu = shape[1], sum(shape) % 2 == 0
    weight, bias = randn(channels).to(device, dtype), randn(channels + 1)[1:].to(device, dtype)
    groups = 2 if channels % 2 == 0 else 1
    out = group_norm(x, weight, bias, groups, 1e-5, silu=silu)
    due = group_norm_torch(x.double(), weight.double(), bias.double(), groups, 1e-5, silu=silu)
    assert out.dtype == dtype
    assert out.shape == x.shape
    if order != ORDERS[2]:
        assert out.stride() == x.stride()
    torch.testing.assert_close(out.double(), due, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_many_pieces_of_a_channel_far_from_zero(device: torch.device) -> None:
    """More pixels than one program takes, around 1000: squares about zero would leave nothing of the variance."""
    x = (randn(1, 2, 9_001) + 1000).to(device)
    weight, bias = torch.ones(2, device=device), torch.zeros(2, device=device)
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        out = group_norm(given, weight, bias, 1, 1e-6, silu=True)
        due = group_norm_torch(x.double(), weight.double(), bias.double(), 1, 1e-6, silu=True)
        torch.testing.assert_close(out.double(), due, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0)], ids=str)
def test_nothing_of_nothing(device: torch.device, shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape, device=device), torch.ones(4, device=device)
    assert group_norm(x, weight, weight, 2, 1e-5).shape == shape


@pytest.mark.parametrize(
    ("shape", "width", "groups", "param"),
    [
        ((1, 6, 2), 6, 4, "groups"),
        ((1, 6, 2), 6, 0, "groups"),
        ((1, 6, 2), 5, 2, "weight_C"),
        ((6, 2), 6, 2, "x"),
    ],
)
def test_what_is_no_group_norm_is_refused(
    shape: tuple[int, ...], width: int, groups: int, param: str
) -> None:
    with refuses(KernelError, param):
        group_norm(torch.zeros(shape), torch.ones(width), torch.ones(width), groups, 1e-5)
