"""Weights in groups as GPUs multiply them, in Triton, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from motet_kernels.linear.group_weights import FLOAT8, GroupWeights
from motet_kernels.linear.grouped_linear import GroupedLinear
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.scales import dense

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# Few rows and many; a part of a block of inputs, and several; groups that end within one.
SHAPES = [(1, 5, 33, 32), (3, 70, 128, 128), (17, 33, 200, 64), (2, 20, 300, 320)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weights(form: str, features: int, inputs: int, group: int, shifted: bool) -> GroupWeights:
    given = torch.Generator().manual_seed(features)
    codes = torch.randint(0, 256, (features, inputs), generator=given, dtype=torch.uint8)
    if form in ("int4", *LEVELS):
        codes = codes & 15
    elif form == "int8":
        codes = codes.view(torch.int8)
    else:
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes).view(FLOAT8)
    shape = (features, -(-inputs // group))
    shift = randn(*shape, seed=1) / 10 if shifted else None
    levels = form if form in LEVELS else None
    return GroupWeights(codes, randn(*shape) / 30, shift, group, None, levels)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize(
    ("form", "shifted"),
    [
        ("int4", False),
        ("int4", True),
        ("int8", False),
        ("float8", False),
        ("fp4", False),
        ("nf4", False),
        ("iq4", False),
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(
    device: torch.device,
    shape: tuple[int, int, int, int],
    form: str,
    shifted: bool,
    dtype: torch.dtype,
) -> None:
    rows, features, inputs, group = shape
    given = weights(form, features, inputs, group, shifted)
    bias = randn(features, seed=2) if features % 2 else None
    linear = GroupedLinear(given, bias, device)
    x, residual = (randn(rows, width, seed=3).to(device, dtype) for width in (inputs, features))
    used = given.dense().to(device, dtype).double()
    due = x.double() @ used.T + (0 if bias is None else bias.double().to(device))
    size = float(used.abs().max()) * inputs**0.5
    for more in (None, residual):
        out = linear(x, more)
        assert out.dtype == dtype
        wanted = due if more is None else due + more.double()
        torch.testing.assert_close(
            out.double(), wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype] * size
        )


def test_inputs_in_another_order(device: torch.device) -> None:
    given = weights("int4", 20, 96, 32, True)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    given = GroupWeights(given.codes_NK, given.scale_NG, given.shift_NG, 32, order)
    x = randn(3, 96).to(device)
    out = GroupedLinear(given, None, device)(x)
    torch.testing.assert_close(out, x @ given.dense().to(device).T, rtol=1e-4, atol=1e-3)


def test_codes_of_four_bits_in_groups_of_sixteen(device: torch.device) -> None:
    given = weights("int4", 20, 80, 16, True)
    x = randn(3, 80).to(device)
    out = GroupedLinear(given, None, device)(x)
    torch.testing.assert_close(out, x @ given.dense().to(device).T, rtol=1e-4, atol=1e-3)


def test_scales_of_sixteen_bits(device: torch.device) -> None:
    given = weights("fp4", 20, 96, 32, False)
    narrow = replace(given, scale_NG=dense(given.scale_NG).bfloat16().float())
    x = randn(3, 96).to(device)
    linear = GroupedLinear(narrow, None, device)
    torch.testing.assert_close(linear(x), x @ narrow.dense().to(device).T, rtol=1e-4, atol=1e-3)
