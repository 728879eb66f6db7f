"""Attention to all tokens on every instruction set of this CPU and in torch, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.attention.full_attention import full_attention
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

# Around the rows of a tile, its columns, and the keys after which sums of integers are taken out.
TOKENS = (1, 2, 5, 6, 7, 14, 15, 16, 17, 31, 33, 63, 64, 65, 130, 200)


def parts(tokens: int, heads: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side in one matrix."""
    qkv = torch.randn(tokens, 3, heads, dim, generator=torch.Generator().manual_seed(seed))
    return tuple(qkv.unbind(1))  # type: ignore[return-value]


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    return ((query @ key.transpose(1, 2) * scale).softmax(-1) @ value).transpose(0, 1)


def rounding_loss(query: Tensor, key: Tensor, scale: float, backend: str) -> float:
    """Return what rounding may change of a result, as a share of the largest value.

    Probabilities and values lose at most 2^-9 of themselves each, and probabilities add up to 1. By AMX results in
    bfloat16 lose as much again, and queries and keys, too: scores change by up to 2^-8 of the sum of their products'
    magnitudes, and probabilities by a factor of e to the power of twice that.
    """
    if backend != "amx":
        return 1 / 256
    magnitudes = torch.einsum("thd,shd->hts", query.abs(), key.abs()) * scale
    return 1 / 128 + math.expm1(2 * float(magnitudes.max()) / 256)


@settings(max_examples=30)
@given(
    tokens=st.sampled_from(TOKENS),
    heads=st.sampled_from([1, 2, 5]),
    dim=st.sampled_from([1, 7, 8, 32, 33, 64, 130]),
    sharp=st.sampled_from([0.1, 1.0, 4.0]),
    rounded=st.booleans(),
    seed=st.integers(0, 100),
)
def test_it_is_attention(
    backend: str, tokens: int, heads: int, dim: int, sharp: float, rounded: bool, seed: int
) -> None:
    query, key, value = parts(tokens, heads, dim, seed)
    out = full_attention(query, key, value, scale=sharp * dim**-0.5, rounded=rounded)
    assert out.shape == (tokens, heads, dim)
    near = 1e-5
    if rounded:
        near = float(value.abs().max()) * rounding_loss(query, key, sharp * dim**-0.5, backend)
    torch.testing.assert_close(
        out.double(), expected(query, key, value, sharp * dim**-0.5), rtol=near, atol=near
    )


def test_rounding_costs_little_even_where_attention_is_spread_over_a_long_sequence(
    isa: str,
) -> None:
    query, key, value = parts(1500, 2, 64)
    most = 1e-2 if isa == "amx" else 3e-3  # bfloat16, or 16-bit integers
    for sharp in (0.0, 1.0, 3.0):
        out = full_attention(query, key, value, scale=sharp / 8, rounded=True).double()
        right = expected(query, key, value, sharp / 8)
        assert float((out - right).norm() / right.norm()) < most


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dim", [1, 33, 64])
def test_bfloat16_is_multiplied_as_it_is(backend: str, tokens: int, dim: int) -> None:
    query, key, value = (part.bfloat16() for part in parts(tokens, 2, dim))
    out = full_attention(query, key, value, scale=dim**-0.5)
    assert out.dtype == torch.bfloat16
    # Probabilities and results lose at most 2^-9 of themselves, and probabilities add up to 1.
    near = float(value.abs().max()) / 128
    right = expected(query, key, value, dim**-0.5)
    torch.testing.assert_close(out.double(), right, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_number_of_threads_changes_no_bit(isa: str, rounded: bool, dtype: torch.dtype) -> None:
    query, key, value = (part.to(dtype) for part in parts(300, 3, 64))
    one = full_attention(query, key, value, scale=0.1, rounded=rounded)
    torch.set_num_threads(3)
    three = full_attention(query, key, value, scale=0.1, rounded=rounded)
    torch.set_num_threads(1)
    assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("what", [0, 1, 2])
def test_what_is_no_number_does_not_pass_for_one(
    backend: str, rounded: bool, what: int, dtype: torch.dtype
) -> None:
    sound = tuple(part.to(dtype) for part in parts(40, 2, 16))
    sound[what][7, 1, 3] = math.nan
    out = full_attention(*sound, scale=0.25, rounded=rounded)
    assert out[:, 0].isfinite().all()
    assert out[7, 1].isnan().any()


def test_the_output_is_of_the_queries_type(backend: str) -> None:
    query, key, value = (x.bfloat16() for x in parts(20, 2, 16))
    out = full_attention(query, key, value, scale=0.25)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out, expected(query, key, value, 0.25).bfloat16(), rtol=1 / 64, atol=1e-2
    )


def test_what_does_not_fit_is_named(backend: str) -> None:
    query, key, value = parts(4, 2, 8)
    assert full_attention(query[:0], key[:0], value[:0], scale=1.0).shape == (0, 2, 8)
    with refuses(KernelError, "key_SHD"):
        full_attention(query, key[:3], value, scale=1.0)
    with refuses(KernelError, "value_SHD"):
        full_attention(query, key, value.double(), scale=1.0)
    with refuses(KernelError, "query_SHD"):
        full_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=1.0)
