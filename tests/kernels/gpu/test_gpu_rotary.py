"""Rotary embedding in Triton, alone and straight to the pages of a cache, against the twins in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet_kernels.attention.head_norm import HeadNorm
from motet_kernels.attention.rotary import (
    PackedHeads,
    rotate_heads,
    rotate_heads_torch,
    rotate_store_kv,
)
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
TOKENS = 3
# queries, keys, dimension, of which rotate
SHAPES = [(2, 1, 16, 16), (4, 2, 20, 8), (3, 0, 6, 2), (17, 3, 10, 10), (1, 1, 96, 0)]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def poisoned(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Strided rows with NaN between them."""
    held = torch.full((TOKENS, width + 7), torch.nan, device=device, dtype=dtype)
    held[:, 3 : width + 3] = (randn(TOKENS, width) * 2).to(device, dtype)
    return held[:, 3 : width + 3]


def tables(
    rotary: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Rows of which no two are alike, nor a row's halves: as they are where positions have several axes."""
    return randn(TOKENS, rotary).to(device, dtype), randn(TOKENS + 1, rotary)[1:].to(device, dtype)


def head_norm(dim: int, device: torch.device) -> HeadNorm:
    return HeadNorm(randn(dim).to(device), (randn(dim) + 1).to(device), 1e-6, 0.5)


def wide(norm: HeadNorm | None) -> HeadNorm | None:
    return norm and norm._replace(
        q_weight_D=norm.q_weight_D.double(), k_weight_D=norm.k_weight_D.double()
    )


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("queries", "keys", "dim", "rotary"), SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_heads(
    device: torch.device,
    queries: int,
    keys: int,
    dim: int,
    rotary: int,
    normed: bool,
    dtype: torch.dtype,
) -> None:
    x_NC, (cos, sin) = poisoned((queries + keys) * dim, device, dtype), tables(rotary, device)
    norm = head_norm(dim, device) if normed else None
    out = rotate_heads(x_NC, queries, dim, cos, sin, norm)
    assert out.dtype == dtype
    expected = rotate_heads_torch(
        x_NC.double(), queries, dim, cos.double(), sin.double(), wide(norm)
    )
    torch.testing.assert_close(
        out.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


def test_tables_of_the_type_of_heads(device: torch.device) -> None:
    x_NC, (cos, sin) = poisoned(48, device, torch.bfloat16), tables(16, device, torch.bfloat16)
    out = rotate_heads(x_NC, 2, 16, cos, sin)
    expected = rotate_heads_torch(x_NC.double(), 2, 16, cos.double(), sin.double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_no_tokens(device: torch.device) -> None:
    table = torch.zeros(0, 8, device=device)
    assert rotate_heads(torch.zeros(0, 24, device=device), 2, 8, table, table).shape == (0, 3, 8)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "rotary"), [(2, 1, 16, 16), (4, 2, 20, 8), (13, 4, 6, 2)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_turn_on_their_way_to_the_cache(
    device: torch.device,
    queries: int,
    keys: int,
    dim: int,
    rotary: int,
    normed: bool,
    dtype: torch.dtype,
    cache: torch.dtype,
) -> None:
    """Only the slots of the step change; the tolerance is that of the coarser type."""
    norm, (cos, sin) = head_norm(dim, device) if normed else None, tables(rotary, device)
    heads = PackedHeads(
        poisoned((queries + 2 * keys) * dim, device, dtype), queries, keys, dim, cos, sin, norm
    )
    stored, slots = caches(keys, dim, device, cache), [9, 0, 14]
    out = rotate_store_kv(heads, *stored, torch.tensor(slots, device=device))
    rotated, value_NKD = (
        heads.x_NC[:, : (queries + keys) * dim],
        heads.x_NC[:, (queries + keys) * dim :],
    )
    rotated = rotate_heads_torch(
        rotated.double(), queries, dim, cos.double(), sin.double(), wide(norm)
    )
    tolerance = max(TOLERANCES[dtype], TOLERANCES[cache])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), rotated[:, :queries], rtol=tolerance, atol=tolerance)
    for n, slot in enumerate(slots):
        key, value = (side[slot // 4, :, slot % 4].double() for side in stored)
        torch.testing.assert_close(key, rotated[n, queries:], rtol=tolerance, atol=tolerance)
        assert torch.equal(value, value_NKD[n].unflatten(0, (keys, dim)).to(cache).double())
    untouched = [slot for slot in range(20) if slot not in slots]
    for side in stored:
        assert side.transpose(1, 2).flatten(0, 1)[untouched].isnan().all()


def caches(keys: int, dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Views into one storage, as the engine has them: 5 blocks of 4 slots, all NaN."""
    storage = torch.full((5, 2 * keys * 4 * dim), torch.nan, device=device, dtype=dtype)
    key, value = storage.chunk(2, dim=1)
    return key.unflatten(1, (keys, 4, dim)), value.unflatten(1, (keys, 4, dim))


def test_a_slot_that_is_not_there_is_left_out(device: torch.device) -> None:
    cos, sin = tables(8, device)
    heads = PackedHeads(poisoned(24, device, torch.float32), 1, 1, 8, cos, sin)
    stored = caches(1, 8, device, torch.float32)
    out = rotate_store_kv(heads, *stored, torch.tensor([-1, 20, 3], device=device))
    assert out.isfinite().all()
    for side in stored:
        assert side.isfinite().sum() == 8
        assert side[0, 0, 3].isfinite().all()


def test_wrong_arguments_are_named(device: torch.device) -> None:
    table, x = torch.zeros(3, 8, device=device), torch.zeros(3, 24, device=device)
    with refuses(KernelError, "cos_NR"):
        rotate_heads(x, 1, 8, table.half(), table)
    with refuses(KernelError, "x_NC"):
        rotate_heads(x.double(), 1, 8, table, table)
    with refuses(KernelError, "sin_NR"):
        rotate_heads(x, 1, 8, table, table.to("meta"))
    slots, stored = torch.arange(3, device=device), caches(1, 8, device, torch.float32)
    with refuses(KernelError, "x_NC"):
        rotate_store_kv(PackedHeads(x, 2, 1, 8, table, table), *stored, slots)
    with refuses(KernelError, "slots_N"):
        rotate_store_kv(PackedHeads(x, 1, 1, 8, table, table), *stored, slots[:2])
    with refuses(KernelError, "value_NKD"):
        rotate_store_kv(PackedHeads(x, 1, 1, 8, table, table), stored[0], stored[1][..., :4], slots)
