"""A KV cache in 8 bits in Triton: the twin's bytes are stored, and attention to them is that to what they stand for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from motet_kernels.attention.kv import store_kv
from motet_kernels.attention.kv_format import CODED, decode, encode, row_size
from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.attention.rotary import PackedHeads, rotate_heads_torch, rotate_store_kv
from motet_kernels.runtime.errors import KernelError
from support.engine.paged_cases import make
from support.running.refusals import refuses

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Queries of 16 bits meet weights of bfloat16.
TOLERANCES = {FP32: 2e-5, FP16: 2e-2, BF16: 2e-2}
SLOTS = 4


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def caches(
    blocks: int, heads: int, dims: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Views into one storage, as the engine has them."""
    sizes = [heads * SLOTS * row_size(dim, dtype) for dim in dims]
    storage = torch.full((blocks, sum(sizes)), 7, dtype=torch.uint8, device=device).view(dtype)
    key, value = (part.unflatten(1, (heads, SLOTS, -1)) for part in storage.split(sizes, dim=1))
    return key, value


def rows_of(cache: Tensor) -> Tensor:
    """Bytes `[P · S, K, D + 4]`, by slot."""
    return cache.view(torch.uint8).transpose(1, 2).flatten(0, 1).cpu()


@pytest.mark.parametrize("cache", CODED, ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_the_twin_s_bytes_are_stored(
    device: torch.device, dtype: torch.dtype, cache: torch.dtype
) -> None:
    key, value = caches(3, 9, (12, 36), device, cache)
    # As model code has them: [K, N, D], and a part of something larger.
    keys, values = (
        randn(9, 5, dim + 3).to(device, dtype).transpose(0, 1)[..., :dim] for dim in (12, 36)
    )
    slots = [7, 0, 11, 2, 5]
    store_kv(keys, values, key, value, torch.tensor(slots, device=device))
    for rows_NKD, held in ((keys, key), (values, value)):
        assert torch.equal(rows_of(held)[slots], encode(rows_NKD.cpu(), cache).view(torch.uint8))
        untouched = [slot for slot in range(12) if slot not in slots]
        assert (rows_of(held)[untouched] == 7).all()


@pytest.mark.parametrize("cache", CODED, ids=str)
def test_rows_that_are_hard_to_round(device: torch.device, cache: torch.dtype) -> None:
    """Zeros, scales that are subnormal or nearly overflow, ties, what is not finite."""
    rows = randn(12, 1, 48)
    rows[0] = 0
    rows[1] *= 1e-42
    rows[2] *= 1e-37
    rows[3] *= 1e38
    rows[4] = torch.arange(-24, 24) + 0.5
    rows[4, 0, 0] = 127
    rows[5, 0, 7] = math.nan
    rows[6, 0, 47] = math.inf
    rows[7, 0, 0] = -math.inf
    rows[8] = (torch.arange(48) - 20) / 1024  # subnormal beside 448, with ties
    rows[8, 0, 0] = 448
    rows[9] = -0.0
    key = caches(3, 1, (48, 48), device, cache)[0]
    store_kv(rows.to(device), None, key, None, torch.arange(12, device=device))
    assert torch.equal(rows_of(key), encode(rows, cache).view(torch.uint8))
    assert decode(key.cpu()).flatten(0, 2)[5:8].isnan().all()


@pytest.mark.parametrize("cache", CODED, ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (20, 8)])
def test_heads_turn_on_their_way_to_the_cache(
    device: torch.device, dim: int, rotary: int, cache: torch.dtype
) -> None:
    x_NC, cos, sin = randn(3, 6 * dim), randn(3, rotary), randn(3, rotary + 1)[:, 1:].contiguous()
    heads = PackedHeads(x_NC.to(device), 2, 2, dim, cos.to(device), sin.to(device))
    key, value = caches(2, 2, (dim, dim), device, cache)
    out = rotate_store_kv(heads, key, value, torch.tensor([6, 99, 1], device=device))
    rotated = rotate_heads_torch(x_NC[:, : 4 * dim], 2, dim, cos, sin)
    torch.testing.assert_close(out.cpu(), rotated[:, :2], rtol=1e-5, atol=1e-5)
    stored, due = (
        decode(rows_of(key)[[6, 1]].view(cache)),
        decode(encode(rotated[[0, 2], 2:], cache)),
    )
    # Where the last bit of a rotated number decides, it is another code.
    step = due.abs() / 8 if cache == FLOAT8 else due.abs().amax(-1, keepdim=True) / 127
    assert bool(((stored - due).abs() <= 1.01 * step + 1e-6).all())
    assert bool(((stored - due).abs() <= 1e-5).float().mean() > 0.95)
    values_NKD = x_NC[:, 4 * dim :].unflatten(1, (2, dim))
    assert torch.equal(rows_of(value)[[6, 1]], encode(values_NKD[[0, 2]], cache).view(torch.uint8))
    for side in (key, value):
        assert (rows_of(side)[[0, 2, 3, 4, 5, 7]] == 7).all()


@pytest.mark.parametrize("cache", CODED, ids=str)
def test_every_code_is_read(device: torch.device, cache: torch.dtype) -> None:
    """A single key has the whole weight, so the result is its value."""
    codes = torch.arange(256)[torch.arange(256) % 128 != 127].to(
        torch.uint8
    )  # without float8's NaN
    scale = torch.tensor([0.25]).view(torch.uint8)
    pad = torch.zeros(2, dtype=torch.uint8)
    value = torch.cat((codes, pad, scale)).view(cache).view(1, 1, 1, 260).to(device)
    batch = PagedBatch(*(torch.tensor(x).int() for x in ([[0]], [0, 1], [1]))).to(device)
    out = paged_attention(
        torch.zeros(1, 1, 256, device=device), value, value[..., :256], batch, scale=1.0
    )
    assert torch.equal(out.cpu().flatten(), decode(value.cpu()).flatten())


@pytest.mark.parametrize(
    ("rows", "heads", "dims", "slots", "dtype", "cache", "options"),
    [
        ([(0, 1)], (1, 1), (16, 16), 1, FP32, INT8, {}),
        ([(40, 1), (3, 33), (0, 1)], (4, 2), (64, 64), 16, BF16, INT8, {}),
        ([(40, 1), (3, 33)], (4, 2), (64, 64), 16, BF16, FLOAT8, {}),
        ([(5, 20), (70, 1)], (6, 2), (96, 48), 16, FP16, FLOAT8, {}),
        ([(5, 3), (9, 1)], (7, 1), (8, 4), 4, FP16, INT8, {}),
        ([(600, 1), (8, 40)], (4, 2), (16, 16), 16, FP32, FLOAT8, {"window": 70}),
        (
            [(30, 20), (520, 1)],
            (2, 1),
            (16, 16),
            16,
            FP32,
            INT8,
            {"softcap": 3.0, "sinks_H": torch.tensor([1.0, -2])},
        ),
        ([(30, 1), (513, 1)], (8, 1), (48, 32), 16, FP16, FLOAT8, {"shared": True}),
        ([(9, 12), (30, 1)], (8, 1), (96, 80), 16, FP32, INT8, {"shared": True}),
        ([(70, 1), (3, 5)], (16, 1), (576, 512), 16, BF16, FLOAT8, {"shared": True}),
    ],
)
def test_attention_is_that_to_what_is_stored(
    device: torch.device,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    slots: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    options: dict[str, Any],
) -> None:
    case = make(
        rows,
        heads=heads,
        dims=dims,
        slots=slots,
        dtype=dtype,
        cache=cache,
        device=device,
        **options,
    )
    out = case.run()
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), case.expected(), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize(("dtype", "cache"), [(FP32, INT8), (BF16, FLOAT8)])
def test_company_changes_no_bit(
    device: torch.device, dtype: torch.dtype, cache: torch.dtype
) -> None:
    rows = [(513, 1), (9, 40), (0, 3)]
    case = make(rows, dims=(16, 16), dtype=dtype, cache=cache, device=device)
    for row, out in enumerate(case.run().split([queries for _, queries in rows])):
        assert torch.equal(case.run([row]), out)


@pytest.mark.parametrize("cache", CODED, ids=str)
def test_nan_stays_in_its_row(device: torch.device, cache: torch.dtype) -> None:
    case = make([(40, 1), (100, 1), (30, 20)], dims=(16, 16), cache=cache, device=device)
    before = case.run()
    bad = encode(torch.full((2, 16), math.nan), cache).view(torch.uint8).to(device)
    case.value_PKSV.view(torch.uint8)[case.tables[1][1], :, 3] = bad
    after = case.run()
    assert after[1].isnan().all()
    assert torch.equal(after[[0, *range(2, 22)]], before[[0, *range(2, 22)]])


def test_rows_that_lie_between_words_are_refused(device: torch.device) -> None:
    rows, slots = torch.zeros(2, 1, 6, device=device), torch.arange(2, device=device)
    key = torch.zeros(1, 1, SLOTS, 10, dtype=torch.int8, device=device)
    with refuses(KernelError, "key_PKSD"):
        store_kv(rows, None, key, None, slots)
    batch = PagedBatch(*(torch.tensor(x).int() for x in ([[0]], [0, 1], [1]))).to(device)
    with refuses(KernelError, "key_PKSD"):
        paged_attention(rows[:1], key, key, batch, scale=1.0)
