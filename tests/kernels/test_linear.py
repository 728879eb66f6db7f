"""Packed matrices in every format, on each instruction set and in torch, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import FORMATS, pack_linear
from motet_kernels.linear.quantization import quantize_channels, quantize_groups
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.memory import HUGE, huge_zeros
from support.running.refusals import refuses

EXACT = ("float32", "bfloat16")
# Rows around which another tile or another way of computing begins, for some instruction set.
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 20, 21, 29, 48, 49, 64)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(linear: Linear, x: Tensor) -> Tensor:
    """In float64, of the weights and of the input as the format rounds them."""
    out = linear.round_input(x.float()).double() @ linear.weight().double().T
    return out if linear.bias_N is None else out + linear.bias_N.double()


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=12)
@given(
    rows=st.sampled_from([0, 1, 3, 8, 14, 33]),
    features=st.sampled_from([1, 16, 31, 64, 150]),
    inputs=st.sampled_from([1, 2, 31, 64, 259, 600]),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_product(
    backend: str, form: str, rows: int, features: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    linear = pack_linear(randn(features, inputs), randn(features) if bias else None, form)
    x, residual = randn(rows, inputs, seed=1).to(dtype), randn(rows, features, seed=2).to(dtype)
    tolerance = (1e-5 if dtype == torch.float32 else 1e-2) * inputs**0.5
    right = expected(linear, x)
    torch.testing.assert_close(linear(x).double(), right, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        linear(x, residual).double(), right + residual, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("inputs", [70, 1100])
def test_a_row_s_bits_do_not_depend_on_its_company(isa: str, form: str, inputs: int) -> None:
    linear = pack_linear(randn(140, inputs), randn(140), form)
    x = randn(64, inputs, seed=1)
    whole = linear(x)
    for rows in ROWS:
        for start in (0, 64 - rows):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order]), whole[order])


@pytest.mark.parametrize("form", FORMATS)
def test_neither_do_they_depend_on_the_number_of_threads_or_on_the_size_of_the_output(
    form: str,
) -> None:
    linear = pack_linear(randn(1088, 300), None, form)
    x = randn(300, 300, seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = linear(x)
        torch.set_num_threads(1)
        assert torch.equal(linear(x), two)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(linear(x[250:]), two[250:])


@pytest.mark.parametrize("form", EXACT)
def test_an_output_is_one_chain_of_sums_over_the_inputs(isa: str, form: str) -> None:
    if isa in ("amx", "avx512bf16") and form == "bfloat16":
        return  # their instructions take in two products or more, and round as their makers like
    linear, x = pack_linear(randn(70, 300), None, form), randn(20, 300, seed=1)
    x = linear.round_input(x)
    chain = torch.zeros(20, 70, dtype=torch.float64)
    for k in range(300):
        product = x[:, k : k + 1].double() * linear.weight()[:, k].double()  # exact
        if isa == "scalar":  # has no fused multiply-add: the product is rounded, too
            product = product.float().double()
        chain = (chain + product).float().double()
    # Rounding to float64 on the way to float32 may change the last bit, once in 2^29.
    assert (linear(x).double() != chain).sum() <= 1


@pytest.mark.parametrize("form", FORMATS)
def test_inputs_of_any_strides(backend: str, form: str) -> None:
    linear = pack_linear(randn(40, 36), None, form)
    x = randn(2, 3, 36, seed=1)
    plain = linear(x)
    assert plain.shape == (2, 3, 40)
    torch.testing.assert_close(linear(x.transpose(0, 1)), plain.transpose(0, 1))
    torch.testing.assert_close(linear(x.expand(4, 2, 3, 36))[3], plain)
    every_second = torch.zeros(2, 3, 72)
    every_second[..., ::2] = x
    torch.testing.assert_close(linear(every_second[..., ::2]), plain)
    torch.testing.assert_close(linear(torch.cat([x, x], dim=-1)[..., 36:]), plain)
    torch.testing.assert_close(linear(x[0, 0]), plain[0, 0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_shows_in_its_row_only(
    backend: str, form: str, value: float
) -> None:
    linear = pack_linear(randn(40, 64), None, form)
    x = randn(9, 64, seed=1)
    plain = linear(x)
    x[4, 33] = value
    out = linear(x)
    assert not out[4].isfinite().any()
    torch.testing.assert_close(out[:4], plain[:4])
    torch.testing.assert_close(out[5:], plain[5:])


@pytest.mark.parametrize("form", FORMATS)
def test_a_copy_has_weights_of_its_own(form: str) -> None:
    linear = pack_linear(randn(40, 64), randn(40), form)
    x = randn(3, 64, seed=1)
    right = linear(x)
    copied = copy.deepcopy(linear)
    linear.packed.zero_()
    assert not torch.equal(linear(x), right)
    assert torch.equal(copied(x), right)


@pytest.mark.parametrize("inputs", [33, 64])
def test_rows_are_exact(backend: str, inputs: int) -> None:
    weight = randn(70, inputs)
    ids = torch.tensor([[0, 69], [31, 32], [5, 5]])
    assert torch.equal(pack_linear(weight, None, "float32").rows(ids), weight[ids])
    assert torch.equal(
        pack_linear(weight, None, "bfloat16").rows(ids.T), weight.bfloat16().float()[ids.T]
    )


@pytest.mark.parametrize(
    ("form", "bits"), [("float32", 32), ("bfloat16", 16), ("int8", 8), ("int4", 4.5)]
)
def test_memory_and_error(form: str, bits: float) -> None:
    weight = randn(256, 512)
    linear = pack_linear(weight, None, form)
    assert linear.packed.nbytes == weight.numel() * bits / 8
    error = (linear.weight() - weight).square().mean().sqrt()
    assert error <= {"float32": 0.0, "bfloat16": 0.002, "int8": 0.008, "int4": 0.085}[form]


def test_bfloat16_weights_stay_what_they_were() -> None:
    weight = randn(33, 70).bfloat16()
    for form in EXACT:
        assert torch.equal(pack_linear(weight, None, form).weight(), weight.float())


# --------------------------------------------------------------------------------------------------------- quantization
def test_channels_are_rounded_to_nearest() -> None:
    weight = torch.cat([randn(8, 40), torch.zeros(1, 40)])
    q_NK, scale_N = quantize_channels(weight)
    assert q_NK[:8].abs().amax(1).tolist() == [127] * 8
    assert not q_NK[8].any()
    assert ((q_NK * scale_N.unsqueeze(1) - weight).abs() <= scale_N.unsqueeze(1) * 0.5001).all()


def test_groups_are_no_worse_than_with_the_scale_of_their_largest_weight() -> None:
    weight = torch.cat([randn(64, 90), torch.zeros(1, 90)])
    q_NK, scale_NG = quantize_groups(weight)
    assert q_NK.shape == (65, 96)
    assert scale_NG.shape == (65, 3)
    assert not q_NK[64].any()
    assert not q_NK[:, 90:].any()
    assert q_NK.min() == -8
    groups = torch.nn.functional.pad(weight, (0, 6)).unflatten(1, (-1, 32))
    plain_scale = (groups.gather(2, groups.abs().argmax(2, keepdim=True)) / -8).bfloat16().float()
    plain = (groups / plain_scale).nan_to_num().round().clamp(-8, 7) * plain_scale
    ours = q_NK.unflatten(1, (-1, 32)) * scale_NG.float().unsqueeze(2)
    assert ((ours - groups).square().sum(2) <= (plain - groups).square().sum(2) + 1e-6).all()


# --------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_cannot_be_rounded_are_named(form: str, value: float) -> None:
    weight = randn(5, 40)
    weight[3, 17] = value
    with refuses(KernelError, "weight_NK[3, 17]"):
        pack_linear(weight, None, form)


def test_wrong_arguments_are_named() -> None:
    weight = randn(5, 4)
    with refuses(KernelError, "format"):
        pack_linear(weight, None, "fp8")
    with refuses(KernelError, "weight_NK"):
        pack_linear(weight.double(), None, "float32")
    with refuses(KernelError, "weight_NK"):
        pack_linear(weight[:0], None, "float32")
    with refuses(KernelError, "bias_N"):
        pack_linear(weight, torch.zeros(4), "float32")
    with refuses(KernelError, "weight_NK"):
        pack_linear(torch.zeros(1, 65537), None, "int8")
    linear = pack_linear(weight, None, "float32")
    with refuses(KernelError, "x"):
        linear(torch.zeros(2, 5))
    with refuses(KernelError, "x"):
        linear(torch.zeros(2, 4, dtype=torch.float64))
    with refuses(KernelError, "residual"):
        linear(torch.zeros(2, 4), torch.zeros(2, 4))
    with refuses(KernelError, "ids"):
        linear.rows(torch.tensor([0, 5]))
    with refuses(KernelError, "format"):
        pack_linear(weight, None, "int8").rows(torch.tensor([0]))
    with refuses(KernelError, "device"):
        linear.to(torch.bfloat16)


# --------------------------------------------------------------------------------------------------------------- memory
def test_huge_memory_is_zero_aligned_and_disjoint() -> None:
    small = [huge_zeros((3, 5), torch.bfloat16) for _ in range(3)]
    large = huge_zeros((40 << 20,), torch.uint8)
    assert large.data_ptr() % HUGE == 0
    for i, tensor in enumerate(small):
        assert tensor.shape == (3, 5)
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.any()
        tensor.fill_(i + 1)
    assert (
        [int(tensor.min()) for tensor in small]
        == [int(tensor.max()) for tensor in small]
        == [1, 2, 3]
    )
    assert not large.any()
    assert huge_zeros((0, 4), torch.float32).shape == (0, 4)
