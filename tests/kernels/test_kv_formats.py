"""A KV cache in 8 bits with a scale per token and head: stored and read on every instruction set, and in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.attention.kv import store_kv
from motet_kernels.attention.kv_format import CODED, SCALE, decode, dim_of, encode
from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch

STEP = {
    torch.int8: 1 / 127,
    torch.float8_e4m3fn: 1 / 8,
}  # between numbers: of the largest, or of the number itself


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache(blocks: int, heads: int, slots: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(blocks, heads, slots, dim + SCALE, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", CODED, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_is_near_what_was_given(
    backend: str, dtype: torch.dtype, given: torch.dtype
) -> None:
    key, value = (randn(20, 3, 40, seed=seed).to(given) for seed in (1, 2))
    stored = [cache(5, 3, 8, 40, dtype) for _ in range(2)]
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(3))[:20]
    store_kv(key, value, stored[0], stored[1], slots)
    for rows_NKD, held in zip((key, value), stored, strict=True):
        assert dim_of(held) == 40
        found = decode(held.view(torch.uint8)[slots // 8, :, slots % 8].view(dtype))
        wide = rows_NKD.float()
        top = wide.abs().amax(-1, keepdim=True)
        bound = 0.51 * STEP[dtype] * (top if dtype == torch.int8 else wide.abs() + top / 448)
        assert bool(((found - wide).abs() <= bound).all())
        assert torch.equal(found.abs().amax(-1).bfloat16(), wide.abs().amax(-1).bfloat16())


@pytest.mark.parametrize("dtype", CODED, ids=str)
def test_the_kernel_stores_the_twin_s_bytes(isa: str, dtype: torch.dtype) -> None:
    rows = torch.cat(
        [randn(30, 2, 48), torch.zeros(1, 2, 48), randn(9, 2, 48) * 1e-30, randn(9, 2, 48) * 1e30]
    )
    held = cache(4, 2, 16, 48, dtype)
    store_kv(rows, None, held, None, torch.arange(len(rows)))
    found = held.view(torch.uint8).transpose(1, 2).flatten(0, 1)[: len(rows)]
    assert torch.equal(found, encode(rows, dtype).view(torch.uint8))


@pytest.mark.parametrize("dtype", CODED, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_nan_throughout(
    backend: str, dtype: torch.dtype, bad: float
) -> None:
    rows = randn(3, 2, 16)
    rows[1, 0, 5] = bad
    held = cache(1, 2, 4, 16, dtype)
    store_kv(rows, None, held, None, torch.arange(3))
    found = decode(held)[0].transpose(0, 1)
    assert found[1, 0].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert found[1, 1].isfinite().all()


@pytest.mark.parametrize("dtype", CODED, ids=str)
@settings(max_examples=8)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 5)), min_size=1, max_size=4),
    dims=st.sampled_from([(16, 16), (64, 64), (40, 24)]),
    latent=st.booleans(),
    window=st.sampled_from([None, 7]),
)
def test_attention_is_that_over_the_numbers_that_are_stored(
    backend: str,
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    dims: tuple[int, int],
    latent: bool,
    window: int | None,
) -> None:
    slots, blocks = 16, sum(-(-sum(row) // 16) for row in rows)
    count = blocks * slots
    coded = [cache(blocks, 2, slots, dim, dtype) for dim in dims]
    store_kv(
        randn(count, 2, dims[0]),
        randn(count, 2, dims[1], seed=1),
        coded[0],
        coded[1],
        torch.arange(count),
    )
    if latent:
        coded[1] = coded[0][..., : dims[1]]
        wide = [decode(coded[0]), decode(coded[0])[..., : dims[1]]]
    else:
        wide = [decode(part) for part in coded]
    starts = torch.tensor([0] + [queries for _, queries in rows]).cumsum(0).int()
    lengths = torch.tensor([sum(row) for row in rows], dtype=torch.int32)
    tables, free = (
        torch.zeros(len(rows), int(-(-lengths.max() // slots)), dtype=torch.int32),
        iter(range(blocks)),
    )
    for table, length in zip(tables, lengths.tolist(), strict=True):
        needed = -(-length // slots)
        table[:needed] = torch.tensor([next(free) for _ in range(needed)])
    batch = PagedBatch(tables, starts, lengths)
    query = randn(int(starts[-1]), 4, dims[0], seed=2)
    found = paged_attention(query, coded[0], coded[1], batch, scale=0.2, window=window)
    due = paged_attention(
        query, wide[0].contiguous(), wide[1].contiguous(), batch, scale=0.2, window=window
    )
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-6)
