"""Integer codes in panels on each instruction set and in torch, against float64 of the rounded input."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.linear.code_linear import CodeLinear
from motet_kernels.linear.group_weights import GroupWeights
from motet_kernels.linear.levels import LEVELS
from motet_kernels.linear.scales import Scales, SpanScales, dense
from motet_kernels.runtime.replay import Tape

FORMATS = ("int2", "int4", "int8", *LEVELS)
# By how much levels of a format are rounded, beside inputs of 8 bits and precise ones (`levels.py`).
ROUNDED = {("nf4", False): 0.0039, ("nf4", True): 6.2e-5}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scales(features: int, groups: int, kind: str, seed: int = 1) -> Scales:
    """Of a type: "float32", "float16", "bfloat16"; or "spans" of eight, which share a float32 or, as
    "spans16", a float16.
    """
    if kind.startswith("spans"):
        drawn = torch.Generator().manual_seed(seed)
        fine = torch.randint(-32, 64, (features, groups), generator=drawn, dtype=torch.int8)
        shared = randn(features, -(-groups // 8), seed=seed) / 1000
        return SpanScales(fine, shared.half() if kind == "spans16" else shared, 8)
    return (randn(features, groups, seed=seed) / 100).to(getattr(torch, kind)).float()


def weights(
    form: str,
    features: int,
    inputs: int,
    group: int,
    *,
    kind: str = "float32",
    shifted: bool = False,
    ordered: bool = False,
) -> GroupWeights:
    """Random codes, scales and shifts; every code occurs where there is room for it."""
    drawn = torch.Generator().manual_seed(features + inputs)
    codes = torch.randint(0, 256, (features, inputs), generator=drawn, dtype=torch.uint8)
    codes = codes.view(torch.int8) if form == "int8" else codes & (3 if form == "int2" else 15)
    groups = -(-inputs // group)
    shift = scales(features, groups, kind, 2) if shifted else None
    order = torch.randperm(inputs, generator=drawn) if ordered else None
    levels = form if form in LEVELS else None
    narrow = form == "int2"
    return GroupWeights(codes, scales(features, groups, kind), shift, group, order, levels, narrow)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 2, 3, 7, 33]),
    features=st.sampled_from([1, 5, 32, 70]),
    inputs=st.sampled_from([1, 31, 64, 200, 515]),
    group=st.sampled_from([16, 32, 48, 64, 128, 1024]),
    kind=st.sampled_from(["float32", "float16", "bfloat16", "spans", "spans16"]),
    shifted=st.booleans(),
    ordered=st.booleans(),
    precise=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_product(
    backend: str,
    form: str,
    rows: int,
    features: int,
    inputs: int,
    group: int,
    kind: str,
    shifted: bool,
    ordered: bool,
    precise: bool,
    dtype: torch.dtype,
) -> None:
    if form not in ("int2", "int4", "int8", "fp4"):
        group = max(32, group // 32 * 32)
    shifted = shifted and form in ("int2", "int4", "int8")
    given = weights(form, features, inputs, group, kind=kind, shifted=shifted, ordered=ordered)
    bias = randn(features, seed=3) if features % 2 else None
    linear = CodeLinear(given, bias, precise=precise)
    exact, off = given.dense(), ROUNDED.get((form, precise), 0.0)
    atol = 1e-7 + off * float(dense(given.scale_NG).abs().max())
    torch.testing.assert_close(linear.weight(), exact, rtol=1e-6, atol=atol)
    torch.testing.assert_close(linear.read(torch.arange(features)), exact, rtol=1e-6, atol=1e-7)
    x, residual = randn(rows, inputs, seed=4).to(dtype), randn(rows, features, seed=5).to(dtype)
    rounded = linear.round_input(x)
    right = rounded.double() @ linear.weight().double().T + (0 if bias is None else bias.double())
    largest = max(float(given.dense().abs().max()), float(dense(given.scale_NG).abs().max()))
    size = largest * inputs**0.5
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(linear(x).double(), right, rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(
        linear(x, residual).double(), right + residual, rtol=tolerance, atol=tolerance * size
    )


def test_rounding_costs_less_than_a_hundredth_and_nothing_where_precise(backend: str) -> None:
    """An input number is off by at most half a step: 1/254 of the largest of its 32."""
    given = weights("int4", 64, 512, 32)
    x = randn(16, 512, seed=4)
    right = x.double() @ given.dense().double().T
    error = (CodeLinear(given, None)(x).double() - right).norm() / right.norm()
    assert 0.001 < float(error) < 0.01
    error = (CodeLinear(given, None, precise=True)(x).double() - right).norm() / right.norm()
    assert float(error) < 1e-4


@pytest.mark.parametrize("form", FORMATS)
def test_every_level_is_what_its_table_says(backend: str, form: str) -> None:
    count = {"int2": 4, "int8": 256}.get(form, 16)
    codes = torch.arange(count, dtype=torch.uint8).unsqueeze(1)
    codes = codes.view(torch.int8) if form == "int8" else codes
    levels = form if form in LEVELS else None
    narrow = form == "int2"
    given = GroupWeights(codes, torch.ones(count, 1), None, 32, None, levels, narrow)
    for precise in (False, True):
        out = CodeLinear(given, None, precise=precise)(torch.ones(1, 1))
        atol = 1e-4 + ROUNDED.get((form, precise), 0.0)
        torch.testing.assert_close(out[0], given.dense()[:, 0], rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("group", "kind"), [(128, "float32"), (32, "spans16"), (32, "bfloat16"), (16, "spans")]
)
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_s_bits_do_not_depend_on_its_company_nor_on_threads(
    isa: str, form: str, group: int, kind: str
) -> None:
    if form not in ("int2", "int4", "int8", "fp4"):
        group = max(32, group)
    shifted = form in ("int2", "int4", "int8")
    given = weights(form, 140, 1100, group, kind=kind, shifted=shifted)
    linear = CodeLinear(given, randn(140))
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
    linear = CodeLinear(weights("int4", 40, 64, 32, shifted=True), None)
    x = randn(5, 64)
    plain = linear(x)
    x[2, 33] = torch.nan
    out = linear(x)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 4]], plain[[0, 1, 3, 4]])


def test_it_is_replayed_and_copied(isa: str) -> None:
    linear = CodeLinear(weights("iq4", 40, 64, 32, kind="spans", ordered=True), None)
    x = randn(1, 64)
    tape = Tape(lambda: linear(x))
    x.copy_(randn(1, 64, seed=7))
    assert torch.equal(tape.replay(), linear(x))
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))


@pytest.mark.parametrize("form", ["int4", "int8"])
def test_rows_of_a_table(backend: str, form: str) -> None:
    given = weights(form, 70, 96, 32, kind="spans", shifted=True, ordered=True)
    ids = torch.tensor([[3, 69], [0, 3]])
    torch.testing.assert_close(CodeLinear(given, None).read(ids), given.dense()[ids])


def test_scales_take_the_narrowest_exact_type() -> None:
    given = weights("int4", 40, 64, 32, kind="bfloat16")
    for scale, kind in (
        (dense(scales(40, 2, "float32")), torch.float32),
        (dense(scales(40, 2, "float16")), torch.float16),
        (dense(scales(40, 2, "bfloat16")) * 2.0**-40, torch.bfloat16),
    ):
        assert CodeLinear(replace(given, scale_NG=scale), None).scale.fine.dtype == kind
    # 4 bits a weight, 8 a group of 16, 32 or 16 for each span of 128: in panels of 32 outputs.
    for name, bits in (("spans", 32), ("spans16", 16)):
        spans = CodeLinear(weights("int4", 40, 512, 16, kind=name), None)
        assert spans.nbytes == 64 * 512 * (4 + 8 / 16 + bits / 128) // 8
