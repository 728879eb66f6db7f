"""Products by head on every instruction set of this CPU and in torch, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.linear.head_linear import FORMATS, HeadLinear
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10)
@given(
    rows=st.sampled_from([0, 1, 2, 7, 13, 40]),
    heads=st.integers(1, 5),
    features=st.sampled_from([1, 12, 32, 70]),
    inputs=st.sampled_from([1, 9, 64, 300]),
)
def test_equals_float64(
    backend: str, form: str, dtype: torch.dtype, rows: int, heads: int, features: int, inputs: int
) -> None:
    weight = random(heads, features, inputs).to(getattr(torch, form))
    wide = random(rows, heads, inputs + 5, seed=1).to(dtype)
    x = wide[..., 2 : inputs + 2]
    held = torch.zeros(rows, heads, features + 3, dtype=dtype)
    out = HeadLinear.pack(weight, form)(x, held[..., :features])
    expected = torch.einsum("mhk,hnk->mhn", x.to(weight.dtype).double(), weight.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * inputs**0.5)
    assert out.data_ptr() == held.data_ptr()
    assert not held[..., features:].any()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("threads", [1, 2])
def test_native_bits_do_not_depend_on_other_rows(isa: str, form: str, threads: int) -> None:
    torch.set_num_threads(threads)
    linear = HeadLinear.pack(random(4, 128, 96), form)
    x = random(50, 4, 96, seed=1)
    whole = linear(x)
    for start, stop in ((0, 1), (1, 3), (3, 17), (17, 50)):
        assert torch.equal(linear(x[start:stop]), whole[start:stop])
    torch.set_num_threads(1)


def test_errors_name_the_argument() -> None:
    linear = HeadLinear.pack(torch.zeros(2, 3, 4), "float32")
    with refuses(KernelError, "form"):
        HeadLinear.pack(torch.zeros(2, 3, 4), "int8")
    with refuses(KernelError, "x_MHK"):
        linear(torch.zeros(1, 3, 4))
    with refuses(KernelError, "out_MHN"):
        linear(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
