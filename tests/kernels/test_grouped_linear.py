"""Float8 in groups on each instruction set, all codes in torch, and mixtures, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.linear.group_weights import (
    FLOAT8,
    GroupWeights,
    can_join,
    joined,
    quantize_float8,
)
from motet_kernels.linear.grouped_linear import GroupedLinear
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.mixed_linear import MixedLinear
from motet_kernels.linear.pack import pack_groups
from motet_kernels.linear.scales import dense
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.replay import Tape
from support.running.refusals import refuses

CPU = torch.device("cpu")
FORMATS = ("int4", "int8", "float8", *LEVELS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(
    form: str,
    features: int,
    inputs: int,
    group: int,
    *,
    shifted: bool = False,
    ordered: bool = False,
) -> GroupWeights:
    """Random codes, scales and shifts; every code occurs where there is room for it."""
    given = torch.Generator().manual_seed(features + inputs)
    codes = torch.randint(0, 256, (features, inputs), generator=given, dtype=torch.uint8)
    if form in ("int4", *LEVELS):
        codes = codes & 15
    elif form == "int8":
        codes = codes.view(torch.int8)
    else:
        codes = torch.where(codes & 0x7F == 0x7F, 0, codes).view(FLOAT8)
    groups = -(-inputs // group)
    scale = randn(features, groups, seed=1) / 100
    shift = randn(features, groups, seed=2) / 10 if shifted else None
    order = torch.randperm(inputs, generator=given) if ordered else None
    return GroupWeights(codes, scale, shift, group, order, form if form in LEVELS else None)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=10)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 7, 33]),
    features=st.sampled_from([1, 5, 32, 70]),
    inputs=st.sampled_from([1, 31, 64, 200, 515]),
    group=st.sampled_from([32, 64, 128, 1024]),
    shifted=st.booleans(),
    ordered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_product(
    backend: str,
    form: str,
    rows: int,
    features: int,
    inputs: int,
    group: int,
    shifted: bool,
    ordered: bool,
    dtype: torch.dtype,
) -> None:
    shifted = shifted and form in ("int4", "int8")
    given = weights(form, features, inputs, group, shifted=shifted, ordered=ordered)
    bias = randn(features, seed=3) if features % 2 else None
    linear = GroupedLinear(given, bias, CPU)
    assert torch.equal(linear.weight(), given.dense())
    x, residual = randn(rows, inputs, seed=4).to(dtype), randn(rows, features, seed=5).to(dtype)
    right = x.double() @ given.dense().double().T + (0 if bias is None else bias.double())
    size = float(given.dense().abs().max()) * inputs**0.5
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(linear(x).double(), right, rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(
        linear(x, residual).double(), right + residual, rtol=tolerance, atol=tolerance * size
    )


def test_parts_of_any_strides(backend: str) -> None:
    given = weights("float8", 40, 96, 32)
    rotated = GroupWeights(
        given.codes_NK.view(torch.uint8).T.clone().T.view(FLOAT8),
        dense(given.scale_NG).T.clone().T,
        None,
        32,
    )
    x = randn(3, 96)
    assert torch.equal(GroupedLinear(rotated, None, CPU)(x), GroupedLinear(given, None, CPU)(x))


def test_groups_of_sixteen(backend: str) -> None:
    given = weights("float8", 40, 80, 16)
    x = randn(3, 80)
    right = x.double() @ given.dense().double().T
    torch.testing.assert_close(
        GroupedLinear(given, None, CPU)(x).double(), right, rtol=1e-5, atol=1e-3
    )


def test_every_code_of_float8_is_what_torch_says(isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    given = GroupWeights(codes.unsqueeze(1).view(FLOAT8), torch.ones(256, 1), None, 32)
    out = GroupedLinear(given, None, CPU)(torch.ones(1, 1))
    assert torch.equal(out[0], codes.view(FLOAT8).float())


def test_a_row_s_bits_do_not_depend_on_its_company_nor_on_threads(isa: str) -> None:
    linear = GroupedLinear(weights("float8", 140, 1100, 128), randn(140), CPU)
    x = randn(21, 1100, seed=1)
    whole = linear(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 21):
        for start in (0, 21 - rows):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(linear(x), whole)
    finally:
        torch.set_num_threads(threads)


def test_what_is_not_finite_shows_in_its_row_only(backend: str) -> None:
    linear = GroupedLinear(weights("float8", 40, 64, 32), None, CPU)
    x = randn(5, 64)
    plain = linear(x)
    x[2, 33] = torch.nan
    out = linear(x)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])


def test_it_is_replayed_and_copied(isa: str) -> None:
    linear = GroupedLinear(weights("float8", 40, 64, 32, ordered=True), None, CPU)
    x = randn(1, 64)
    tape = Tape(lambda: linear(x))
    x.copy_(randn(1, 64, seed=7))
    assert torch.equal(tape.replay(), linear(x))
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))


def test_those_that_are_alike_are_joined() -> None:
    first, second = (
        weights("int4", 8, 64, 32, shifted=True),
        weights("int4", 24, 64, 32, shifted=True),
    )
    assert can_join([first, second])
    assert torch.equal(joined([first, second]).dense(), torch.cat([first.dense(), second.dense()]))
    for other in (
        weights("int8", 24, 64, 32, shifted=True),
        weights("int4", 24, 64, 64, shifted=True),
        weights("int4", 24, 64, 32),
        weights("int4", 24, 64, 32, shifted=True, ordered=True),
    ):
        assert not can_join([first, other])


@pytest.mark.parametrize("rows", [1, 5])
def test_formats_side_by_side(backend: str, rows: int) -> None:
    given = [
        weights("int4", 40, 96, 32, shifted=True),
        weights("int8", 10, 96, 16),
        weights("float8", 33, 96, 96),
    ]
    mixed = MixedLinear([pack_groups(one, randn(len(one.codes_NK)), CPU) for one in given])
    x, residual = randn(rows, 96), randn(rows, 83, seed=1)
    alone = torch.cat([part(x) for part in mixed.parts], dim=1)
    assert torch.equal(mixed(x), alone)
    torch.testing.assert_close(mixed(x, residual), alone + residual, rtol=1e-5, atol=1e-4)
    assert torch.equal(copy.deepcopy(mixed)(x), alone)
    torch.testing.assert_close(mixed.weight(), torch.cat([one.dense() for one in given]))
    with refuses(KernelError, "parts"):
        MixedLinear([GroupedLinear(weights("int4", 8, 64, 32), None, CPU), mixed.parts[0]])


def test_float8_keeps_three_bits() -> None:
    given = randn(20, 70)
    error = (quantize_float8(given).dense() - given).abs()
    assert float((error / given.abs().clamp(min=0.1)).max()) < 1 / 16


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"group": 24}, "group"),
        ({"group": 16, "levels": "nf4"}, "group"),
        ({"levels": "nf5"}, "levels"),
        (
            {"scale_NG": torch.ones(8, 3)},
            "scale_NG",
        ),
        ({"shift_NG": torch.full((8, 2), torch.inf)}, "shift_NG"),
        ({"codes_NK": torch.ones(8, 64)}, "codes_NK"),
        (
            {"order_K": torch.zeros(64, dtype=torch.int64)},
            "order_K",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], param: str) -> None:
    plain = {
        "codes_NK": torch.ones(8, 64, dtype=torch.uint8),
        "scale_NG": torch.ones(8, 2),
        "shift_NG": None,
        "levels": None,
    }
    with refuses(KernelError, param):
        GroupWeights(**{**plain, "group": 32, "order_K": None, **change})  # type: ignore[arg-type]
