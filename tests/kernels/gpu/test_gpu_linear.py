"""Matrices as GPUs read them, and their products in Triton, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from motet_kernels.linear.linear import Linear
from motet_kernels.linear.pack import GPU_FORMATS, pack_linear
from motet_kernels.linear.row_linear import RowLinear
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
# Few rows and many; one block of inputs and a part of one; enough inputs that they are split.
SHAPES = [(1, 5, 33), (3, 70, 128), (17, 33, 200), (2, 20, 1500), (20, 33, 1100)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote yet is full of NaN, or of the largest integer."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(was)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def strided(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, seed: int = 1
) -> torch.Tensor:
    """Rows with NaN between them."""
    wide = torch.full((rows, width + 3), torch.nan)
    wide[:, :width] = randn(rows, width, seed=seed)
    return wide.to(device, dtype)[:, :width]


def expected(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """In float64, of input and weights as they are multiplied."""
    weight = linear.weight()
    if linear.format == "int4":
        weight = weight.to(torch.bfloat16 if x.dtype == torch.float32 else x.dtype)
    return linear.round_input(x).double() @ weight.double().T


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_weights(
    device: torch.device, shape: tuple[int, int, int], form: str, dtype: torch.dtype
) -> None:
    rows, features, inputs = shape
    bias = randn(features, seed=2) if features % 2 else None
    linear = pack_linear(randn(features, inputs), bias, form, device)
    x, residual = (
        strided(rows, inputs, dtype, device),
        strided(rows, features, dtype, device, seed=3),
    )
    due = expected(linear, x) + (0 if bias is None else bias.double().to(device))
    for more in (None, residual):
        out = linear(x, more)
        assert out.dtype == dtype
        wanted = due if more is None else due + more.double()
        torch.testing.assert_close(
            out.double(), wanted, rtol=DTYPES[dtype], atol=DTYPES[dtype] * inputs**0.5
        )


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_exact_weights(device: torch.device, form: str, dtype: torch.dtype) -> None:
    linear = pack_linear(randn(7, 40), randn(7), form, device)
    plain = pack_linear(randn(7, 40), None, form, device)
    x, residual = strided(3, 40, dtype, device), strided(3, 7, dtype, device)
    tolerance = max(DTYPES[dtype], DTYPES[getattr(torch, form)])
    for one in (linear, plain):
        due = expected(one, x) + (0 if one.bias_N is None else one.bias_N.double())
        torch.testing.assert_close(one(x).double(), due, rtol=tolerance, atol=tolerance * 7)
        torch.testing.assert_close(
            one(x, residual).double(), due + residual.double(), rtol=tolerance, atol=tolerance * 7
        )


@pytest.mark.parametrize("form", GPU_FORMATS)
def test_no_rows_and_rows_of_a_batch(device: torch.device, form: str) -> None:
    linear = pack_linear(randn(6, 40), None, form, device)
    assert isinstance(linear, RowLinear)
    assert linear(torch.zeros(0, 40, device=device)).shape == (0, 6)
    x = randn(2, 3, 40).to(device)
    assert linear(x).shape == (2, 3, 6)
    torch.testing.assert_close(linear(x)[1], linear(x[1]))


def test_rows_that_are_not_finite_stay_among_themselves(device: torch.device) -> None:
    linear = pack_linear(randn(6, 40), None, "int8", device)
    x = randn(4, 40).to(device)
    plain = linear(x)
    x[1, 3], x[2, 39] = torch.nan, -torch.inf
    out = linear(x)
    assert out[1:3].isnan().all()
    assert torch.equal(out[[0, 3]], plain[[0, 3]])
    assert not linear(torch.zeros(1, 40, device=device)).any()


def test_int8_gives_a_row_the_same_bits_in_any_company(device: torch.device) -> None:
    """Its sums are exact, however the inputs are split and the rows are tiled."""
    linear = pack_linear(randn(9, 1200), None, "int8", device)
    x = randn(18, 1200).to(device)
    assert torch.equal(linear(x)[:1], linear(x[:1]))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_the_twin_gives_the_same(device: torch.device, form: str) -> None:
    linear = pack_linear(randn(6, 200), randn(6), form, device)
    x = randn(3, 200).to(device)
    torch.testing.assert_close(
        linear.forward_torch(x, x[:, :6]), linear(x, x[:, :6]), rtol=0.01, atol=0.1
    )


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_rows_are_exact(device: torch.device, form: str) -> None:
    weight, ids = randn(7, 33), torch.tensor([[0, 6], [5, 5]], device=device)
    due = weight.to(getattr(torch, form)).float().to(device)
    assert torch.equal(pack_linear(weight, None, form, device).rows(ids), due[ids])


@pytest.mark.parametrize(("form", "bits"), [("float16", 16), ("int8", 8), ("int4", 4.5)])
def test_memory_and_error(device: torch.device, form: str, bits: float) -> None:
    weight = randn(64, 512)
    linear = pack_linear(weight, None, form, device)
    assert linear.nbytes == weight.numel() * bits / 8 + (64 * 4 if form == "int8" else 0)
    error = (linear.weight().cpu() - weight).square().mean().sqrt()
    assert error <= {"float16": 0.0003, "int8": 0.008, "int4": 0.085}[form]


def test_wrong_arguments_are_named(device: torch.device) -> None:
    linear = pack_linear(randn(5, 4), None, "int4", device)
    with refuses(KernelError, "format"):
        pack_linear(randn(5, 4), None, "fp8", device)
    with refuses(KernelError, "x"):
        linear(torch.zeros(2, 4, dtype=torch.float64, device=device))
    with refuses(KernelError, "residual"):
        linear(torch.zeros(2, 4, device=device), torch.zeros(2, 4, device=device))
    with refuses(KernelError, "x"):
        linear(torch.zeros(2, 4, device="meta"))
    with refuses(KernelError, "device"):
        linear.half()
    with refuses(KernelError, "weight_NK[3, 2]"):
        pack_linear(
            randn(5, 4).index_put_((torch.tensor(3), torch.tensor(2)), torch.tensor(torch.inf)),
            None,
            "int8",
        )
