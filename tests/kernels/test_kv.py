"""Storing in the pages of a KV cache, on every instruction set of this CPU and in torch, against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.attention.kv import NO_SLOT, store_kv
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

DTYPES = [torch.float32, torch.bfloat16]


def caches(
    blocks: int, heads: int, slots: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    key, value = (torch.randn(blocks, heads, slots, dim).to(dtype) for dim in dims)
    return key, value


@settings(max_examples=30)
@given(
    tokens=st.integers(0, 40),
    heads=st.integers(1, 3),
    slots=st.sampled_from([1, 4, 16]),
    dims=st.sampled_from([(16, 16), (5, 33), (64, 40)]),
    dtype=st.sampled_from(DTYPES),
    cache=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_each_token_goes_to_its_slot(
    backend: str,
    tokens: int,
    heads: int,
    slots: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    **chosen: Any,
) -> None:
    torch.manual_seed(chosen["seed"])
    blocks = -(-tokens // slots) + 2
    stored = caches(blocks, heads, slots, dims, chosen["cache"])
    expected = [cache.clone() for cache in stored]
    # As model code has them: [K, N, D], and a part of something larger.
    key, value = (
        torch.randn(heads, tokens, dim + 3).to(dtype).transpose(0, 1)[..., :dim] for dim in dims
    )
    to = torch.randperm(blocks * slots)[:tokens]
    store_kv(key, value, *stored, to)
    for rows_NKD, cache_PKSD in zip((key, value), expected, strict=True):
        for n, slot in enumerate(to.tolist()):
            cache_PKSD[slot // slots, :, slot % slots] = rows_NKD[n].to(cache_PKSD.dtype)
    for got, want in zip(stored, expected, strict=True):
        assert torch.equal(got, want)


def test_many_tokens_and_threads(backend: str) -> None:
    torch.set_num_threads(2)
    key, value = caches(130, 4, 16, (64, 64), torch.bfloat16)
    rows, to = torch.randn(2000, 4, 64), torch.randperm(130 * 16)[:2000]
    store_kv(rows, -rows, key, value, to)
    torch.set_num_threads(1)
    assert torch.equal(key.transpose(1, 2).flatten(0, 1)[to], rows.bfloat16())
    assert torch.equal(value.transpose(1, 2).flatten(0, 1)[to], -rows.bfloat16())


def test_rounding_is_torch_s(backend: str) -> None:
    """Ties, denormals, what overflows to infinity, infinities and NaN."""
    bits = torch.randint(
        -(2**31), 2**31, (64, 1, 48), generator=torch.Generator().manual_seed(0)
    ).int()
    rows = bits.view(torch.float32)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8]
    rows[0, 0, : len(special)] = torch.tensor(special)
    key = torch.zeros(4, 1, 16, 48, dtype=torch.bfloat16)
    store_kv(rows, None, key, None, torch.arange(64))
    stored, wanted = key.view(64, 48), rows.bfloat16().view(64, 48)
    assert torch.equal(stored.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(stored[numbers].view(torch.int16), wanted[numbers].view(torch.int16))


def test_padding_is_not_stored(backend: str) -> None:
    key, value = caches(2, 1, 4, (16, 16), torch.float32)
    before, rows = key.clone(), torch.randn(3, 1, 16)
    store_kv(rows, -rows, key, value, torch.tensor([NO_SLOT, 5, NO_SLOT]))
    assert torch.equal(key[1, 0, 1], rows[1, 0])
    assert torch.equal(value[1, 0, 1], -rows[1, 0])
    key[1, 0, 1] = before[1, 0, 1]
    assert torch.equal(key, before)


@pytest.mark.parametrize("slot", [-2, 8])
def test_a_slot_that_is_not_there_changes_nothing(backend: str, slot: int) -> None:
    key, value = caches(2, 1, 4, (16, 16), torch.float32)
    before = key.clone()
    with refuses(KernelError, "slots_N[1]"):
        store_kv(
            torch.zeros(3, 1, 16), torch.zeros(3, 1, 16), key, value, torch.tensor([2, slot, 3])
        )
    assert torch.equal(key, before)


ROWS, CACHE, SLOTS = torch.zeros(3, 2, 8), torch.zeros(2, 2, 4, 8), torch.arange(3)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (
            (ROWS.half(), ROWS, CACHE, CACHE, SLOTS),
            "key_NKD",
        ),
        (
            (ROWS, ROWS[..., :7], CACHE, CACHE, SLOTS),
            "value_NKD",
        ),
        ((ROWS, ROWS, CACHE, CACHE, SLOTS.int()), "slots_N"),
        ((ROWS, ROWS, CACHE, CACHE, SLOTS[:2]), "slots_N"),
        (
            (ROWS, ROWS, CACHE, CACHE[:, :, :3], SLOTS),
            "value_PKSD",
        ),
        ((ROWS, ROWS, CACHE.flatten(1), CACHE, SLOTS), "key_PKSD"),
        ((ROWS, ROWS, CACHE, None, SLOTS), "value_NKD"),
        ((ROWS, ROWS, CACHE.to("meta"), CACHE, SLOTS), "key_NKD"),
    ],
)
def test_what_does_not_fit_is_named(backend: str, arguments: Any, param: str) -> None:
    with refuses(KernelError, param):
        store_kv(*arguments)
