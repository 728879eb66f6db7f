"""Storing in the pages of a KV cache in Triton, against plain loops: what is stored is exact."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from motet_kernels.attention.kv import store_kv
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = 4


def caches(
    blocks: int, heads: int, dims: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Views into one storage, as the engine has them, all NaN."""
    sizes = [heads * SLOTS * dim for dim in dims]
    storage = torch.full((blocks, sum(sizes)), torch.nan, device=device, dtype=dtype)
    key, value = storage.split(sizes, dim=1)
    return key.unflatten(1, (heads, SLOTS, dims[0])), value.unflatten(1, (heads, SLOTS, dims[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "dims"), [(0, 1, (8, 8)), (1, 9, (5, 33)), (5, 2, (16, 16))]
)
def test_each_token_goes_to_its_slot(
    device: torch.device,
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    cache: torch.dtype,
) -> None:
    stored = caches(3, heads, dims, device, cache)
    expected = [side.clone() for side in stored]
    generator = torch.Generator().manual_seed(tokens + heads)
    # As model code has them: [K, N, D], and a part of something larger.
    rows = [
        torch.randn(heads, tokens, dim + 3, generator=generator).to(device, dtype) for dim in dims
    ]
    key, value = (row.transpose(0, 1)[..., :dim] for row, dim in zip(rows, dims, strict=True))
    to = torch.randperm(3 * SLOTS, generator=generator)[:tokens]
    store_kv(key, value, *stored, to.to(device))
    for rows_NKD, cache_PKSD in zip((key, value), expected, strict=True):
        for n, slot in enumerate(to.tolist()):
            cache_PKSD[slot // SLOTS, :, slot % SLOTS] = rows_NKD[n].to(cache)
    for got, want in zip(stored, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_latent_is_key_and_value_at_once(device: torch.device) -> None:
    key = torch.full((2, 1, SLOTS, 40), torch.nan, device=device, dtype=torch.bfloat16)
    rows = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(0)).to(device)
    store_kv(rows, None, key, None, torch.tensor([1, 6, 2], device=device))
    assert torch.equal(key.view(8, 40)[[1, 6, 2]], rows[:, 0].bfloat16())
    assert key.view(8, 40)[[0, 3, 4, 5, 7]].isnan().all()


def test_rounding_is_torch_s(device: torch.device) -> None:
    """Ties, denormals, what overflows to infinity, infinities and NaN."""
    bits = torch.randint(
        -(2**31), 2**31, (8, 1, 48), generator=torch.Generator().manual_seed(0)
    ).int()
    rows = bits.view(torch.float32)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8]
    rows[0, 0, : len(special)] = torch.tensor(special)
    key = torch.zeros(2, 1, SLOTS, 48, dtype=torch.bfloat16, device=device)
    store_kv(rows.to(device), None, key, None, torch.arange(8, device=device))
    torch.testing.assert_close(
        key.view(8, 48).cpu(), rows.bfloat16()[:, 0], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("slot", [-1, -(2**40), 8, 2**40])
def test_a_slot_that_is_not_there_is_left_out(device: torch.device, slot: int) -> None:
    """Nobody waits to see it; the memory around the cache, here part of the same storage, stays as it is."""
    held = torch.full((4, 2, 2, SLOTS, 16), torch.nan, device=device)
    key, value = held[1:3, 0], held[1:3, 1]
    rows = torch.ones(3, 2, 16, device=device)
    store_kv(rows, 2 * rows, key, value, torch.tensor([2, slot, 3], device=device))
    assert (key[0, :, 2:] == 1).all()
    assert (value[0, :, 2:] == 2).all()
    assert held.isfinite().sum() == 2 * 2 * 2 * 16


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    rows, slots = torch.zeros(3, 2, 8, device=device), torch.arange(3, device=device)
    key, value = caches(2, 2, (8, 8), device, torch.float32)
    with refuses(KernelError, "key_NKD"):
        store_kv(rows.double(), rows, key, value, slots)
    with refuses(KernelError, "value_NKD"):
        store_kv(rows, rows[..., :7], key, value, slots)
    with refuses(KernelError, "slots_N"):
        store_kv(rows, rows, key, value, slots.to("meta"))
    with refuses(KernelError, "value_PKSD"):
        store_kv(rows, rows, key, value[:1], slots)
