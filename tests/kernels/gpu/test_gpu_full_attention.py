"""Attention within packed rows in Triton against the twin in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from motet_kernels.attention.full_attention import (
    full_attention,
    packed_attention,
    packed_attention_torch,
)
from motet_kernels.runtime.errors import KernelError
from motet_kernels.spans import Spans
from support.running.refusals import refuses

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCES = {FP32: 2e-5, FP16: 3e-3, BF16: 2e-2}

Parts = tuple[Tensor, Tensor, Tensor]


def parts(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = FP32,
) -> Parts:
    """Queries, keys and values of (query, key) heads and (key, value) dims, as views of something larger."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    wide = (
        torch.randn(count, tokens, 2 * dim, generator=draw).to(device, dtype)
        for count, dim in shapes
    )
    query, key, value = (part.transpose(0, 1)[..., : part.shape[-1] // 2] for part in wide)
    return query, key, value


def expected(given: Parts, spans: Spans, causal: bool, window: int | None) -> Tensor:
    rows = [
        tuple(part[start:stop].double() for part in given)
        for start, stop in spans.pairs
        if stop > start
    ]
    outs = [packed_attention_torch(*row, scale=0.3, causal=causal, window=window) for row in rows]
    return torch.cat(outs) if outs else given[0][..., : given[2].shape[-1]].double()


@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "causal", "window"),
    [
        ([1], (1, 1), (16, 16), False, None),
        ([5, 0, 33, 1], (2, 2), (16, 16), False, None),
        ([70, 7], (3, 1), (24, 40), False, None),
        ([40, 65], (4, 2), (16, 16), True, None),
        ([3, 90], (2, 2), (16, 16), False, 8),
        ([100, 2], (4, 2), (16, 16), True, 33),
        ([9], (2, 2), (80, 96), False, None),
        ([20], (1, 1), (130, 7), False, 1),
        ([], (2, 2), (16, 16), False, None),
        ([0], (2, 2), (16, 16), True, 3),
    ],
)
def test_it_is_attention(
    device: torch.device,
    lengths: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    causal: bool,
    window: int | None,
) -> None:
    given, spans = parts(sum(lengths), heads, dims, device), Spans.of(lengths, device)
    out = packed_attention(*given, spans, scale=0.3, causal=causal, window=window)
    due = expected(given, spans, causal, window)
    torch.testing.assert_close(out.double(), due, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_one_sequence_of_every_type(device: torch.device, tokens: int, dtype: torch.dtype) -> None:
    given = parts(tokens, (2, 2), (24, 24), device, dtype)
    out = full_attention(*given, scale=0.3)
    assert out.dtype == dtype
    due = expected(given, Spans.of([tokens], device), False, None)
    torch.testing.assert_close(out.double(), due, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [None, 9])
def test_company_changes_no_bit(device: torch.device, window: int | None) -> None:
    lengths = [70, 1, 33]
    given, spans = parts(sum(lengths), (4, 2), (16, 16), device, BF16), Spans.of(lengths, device)
    together = packed_attention(*given, spans, scale=0.3, window=window)
    for start, stop in spans.pairs:
        query, key, value = (part[start:stop] for part in given)
        alone = packed_attention(
            query, key, value, Spans.of([stop - start], device), scale=0.3, window=window
        )
        assert torch.equal(alone, together[start:stop])


def test_nan_stays_in_its_row(device: torch.device) -> None:
    given, spans = parts(60, (2, 2), (16, 16), device), Spans.of([20, 30, 10], device)
    before = packed_attention(*given, spans, scale=0.3)
    for part in given[1:]:
        part[20:50] = math.nan
    after = packed_attention(*given, spans, scale=0.3)
    assert after[20:50].isnan().all()
    assert torch.equal(torch.cat([after[:20], after[50:]]), torch.cat([before[:20], before[50:]]))


def test_what_does_not_fit_is_named(device: torch.device) -> None:
    query, key, value = parts(4, (4, 2), (8, 8), device)
    spans = Spans.of([4], device)
    for call, param in (
        ((query, key, value, Spans.of([3], device)), "query_NHD"),
        ((query, key[..., :7], value, spans), "key_NKD"),
        ((query[:, :3], key, value, spans), "query_NHD"),
        ((query, key, value[:, :1], spans), "value_NKV"),
        ((query, key, value.double(), spans), "value_NKV"),
        ((query, key, value, Spans.of([4], torch.device("meta"))), "spans"),
    ):
        with refuses(KernelError, param):
            packed_attention(*call, scale=1.0)
    with refuses(KernelError, "window"):
        packed_attention(query, key, value, spans, scale=1.0, window=0)
