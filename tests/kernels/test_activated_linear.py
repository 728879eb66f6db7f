"""Products with an activation, beside the product and the activation on their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet_kernels import gates
from motet_kernels.linear.activated_linear import MANY_ROWS, activated_linear, gated_linear
from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import pack_linear
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

DTYPES = (torch.float32, torch.bfloat16)
SMALLEST = 1.2e-38  # smaller ones may become 0


def packed(outputs: int, inputs: int, form: str, bias: bool) -> Linear:
    generator = torch.Generator().manual_seed(outputs + inputs)
    bias_N = torch.randn(outputs, generator=generator) if bias else None
    return pack_linear(torch.randn(outputs, inputs, generator=generator) * 0.1, bias_N, form)


def rows(count: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count)).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0.0, atol=SMALLEST)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 70), (256, 1024)])
@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_it_is_the_activation_of_the_product(
    isa: str, form: str, bias: bool, shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    linear = packed(*shape, form, bias)
    x = rows(MANY_ROWS + 21, shape[1], dtypes[0])
    wide = linear.into(torch.float32, x)
    for name in ("silu", "gelu_tanh", "gelu"):
        right = getattr(gates, name)(wide).to(dtypes[1])
        assert same(activated_linear(linear, x, name, dtype=dtypes[1]), right)
    for name in ("silu", "gelu_tanh"):
        right = gates.gated(wide, name).to(dtypes[0])
        assert same(gated_linear(linear, x, name), right)
        narrow = gated_linear(linear, x, name, narrows=True)
        assert same(narrow.bfloat16(), right.bfloat16())


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_a_row_is_the_same_in_few_and_in_many(isa: str, form: str) -> None:
    linear, x = packed(128, 96, form, True), rows(3 * MANY_ROWS, 96, torch.float32)
    for compute in (activated_linear, gated_linear):
        whole = compute(linear, x, "silu")
        for start, stop in ((0, 1), (5, 40), (40, 40 + MANY_ROWS)):
            assert same(compute(linear, x[start:stop], "silu"), whole[start:stop])


def test_widths_that_fill_no_panels(backend: str) -> None:
    linear, x = packed(50, 70, "bfloat16", True), rows(MANY_ROWS, 70, torch.float32)
    assert same(activated_linear(linear, x, "silu"), gates.silu(linear(x)))
    assert same(gated_linear(linear, x, "silu"), gates.gated(linear(x), "silu"))


def test_other_activations_are_refused() -> None:
    linear, x = packed(32, 32, "float32", False), rows(2, 32, torch.float32)
    with refuses(KernelError, "activation"):
        activated_linear(linear, x, "relu")
