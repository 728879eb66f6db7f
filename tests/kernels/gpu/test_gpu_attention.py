"""Paged attention in Triton against float64. Segments are 512 keys, blocks of keys 64 or 32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.runtime.errors import KernelError
from motet_kernels.spans import Spans
from support.engine.paged_cases import make
from support.running.refusals import refuses

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Weights are rounded to the cache's type before they meet the values.
TOLERANCES = {FP32: 2e-5, FP16: 3e-3, BF16: 2e-2}


def check(case: Any) -> None:
    out = case.run()
    near = max(TOLERANCES[case.query_NHD.dtype], TOLERANCES[case.key_PKSD.dtype])
    assert out.dtype == case.query_NHD.dtype
    torch.testing.assert_close(out.double(), case.expected(), rtol=near, atol=near)


@pytest.mark.parametrize(
    ("rows", "heads", "dims", "slots", "options"),
    [
        ([(0, 1)], (1, 1), (16, 16), 1, {}),
        ([(37, 1), (0, 1), (64, 1)], (4, 2), (16, 16), 8, {}),
        ([(40, 1), (3, 33), (0, 1)], (4, 2), (64, 64), 16, {}),
        ([(0, 70)], (2, 2), (80, 80), 32, {}),
        ([(5, 20), (70, 1)], (6, 2), (96, 96), 16, {}),
        ([(5, 3), (9, 1)], (7, 1), (7, 5), 4, {}),
        ([(130, 2)], (40, 1), (40, 24), 16, {}),
        ([(12, 30), (600, 1)], (5, 5), (24, 48), 48, {}),
        ([(0, 40), (70, 1)], (3, 3), (16, 16), 16, {"causal": False}),
        ([(600, 1), (90, 1), (8, 40)], (4, 2), (16, 16), 16, {"window": 70}),
        ([(600, 1), (8, 40)], (2, 1), (16, 16), 16, {"window": 1}),
        ([(700, 2), (20, 1)], (2, 1), (16, 16), 16, {"window": 600, "softcap": 3.0}),
        ([(30, 20), (40, 1)], (4, 2), (16, 16), 16, {"softcap": 3.0}),
        (
            [(30, 20), (40, 1), (1030, 3)],
            (4, 2),
            (16, 16),
            16,
            {"sinks_H": torch.tensor([1.0, -2.0, 5.0, 0.0])},
        ),
    ],
)
def test_it_is_attention(
    device: torch.device,
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    slots: int,
    options: dict[str, Any],
) -> None:
    check(make(rows, heads=heads, dims=dims, slots=slots, device=device, **options))


@pytest.mark.parametrize("cache", [FP32, BF16, FP16])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_of_every_type(device: torch.device, dtype: torch.dtype, cache: torch.dtype) -> None:
    check(make([(40, 1), (9, 40)], dims=(48, 32), dtype=dtype, cache=cache, device=device))


@pytest.mark.parametrize("dims", [(48, 32), (40, 24), (96, 80)])
@pytest.mark.parametrize("cache", [FP32, BF16])
def test_values_may_be_a_view_of_the_keys(
    device: torch.device, dims: tuple[int, int], cache: torch.dtype
) -> None:
    rows = [(30, 1), (9, 12), (513, 1)]
    check(make(rows, heads=(8, 1), dims=dims, dtype=cache, cache=cache, shared=True, device=device))


def test_of_a_latent(device: torch.device) -> None:
    check(
        make(
            [(70, 1), (3, 5)],
            heads=(16, 1),
            dims=(576, 512),
            cache=BF16,
            dtype=BF16,
            shared=True,
            device=device,
        )
    )


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_large_scores_do_not_overflow(device: torch.device, softcap: float | None) -> None:
    case = make([(70, 20), (600, 1)], dims=(16, 16), scale=200.0, softcap=softcap, device=device)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_rows_at_random(device: torch.device, seed: int) -> None:
    """Kinds of rows, sizes and options in combinations that nobody thought of."""
    draw = torch.Generator().manual_seed(seed)

    def one_of(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    rows = [
        (one_of(0, 3, 63, 64, 200, 511, 600), one_of(1, 1, 1, 2, 17, 40))
        for _ in range(one_of(1, 2, 4))
    ]
    heads = one_of((1, 1), (4, 2), (6, 2), (5, 5), (18, 1))
    sight = one_of({}, {"window": one_of(5, 70, 520)}, {"causal": False})
    sinks = one_of(None, torch.randn(heads[0], generator=draw))
    dims, slots = one_of((16, 16), (24, 24), (20, 40)), one_of(1, 5, 16, 32)
    softcap = one_of(None, 3.0)
    check(
        make(
            rows,
            heads=heads,
            dims=dims,
            slots=slots,
            device=device,
            sinks_H=sinks,
            softcap=softcap,
            **sight,
        )
    )


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (FP32, {}),
        (BF16, {"window": 90}),
        (BF16, {"softcap": 5.0, "sinks_H": torch.ones(4)}),
        (BF16, {"causal": False}),
    ],
)
def test_company_changes_no_bit(
    device: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """One query, a few, many; with and without segments and tiles of long rows beside it."""
    rows = [(513, 1), (9, 40), (0, 3)]
    case = make(rows, dims=(16, 16), dtype=dtype, cache=dtype, device=device, **options)
    together = case.run().split([queries for _, queries in rows])
    order = [2, 1, 0]
    for row, out in zip(order, case.run(order).split([rows[row][1] for row in order]), strict=True):
        assert torch.equal(out, together[row])
        assert torch.equal(case.run([row]), out)


def test_nan_stays_in_its_row(device: torch.device) -> None:
    case = make([(40, 1), (100, 1), (30, 20)], dims=(16, 16), device=device)
    before = case.run()
    case.key_PKSD[case.tables[1][0], :, 3] = math.nan
    case.value_PKSV[case.tables[1][1], :, 3] = math.nan
    after = case.run()
    assert after[1].isnan().all()
    assert torch.equal(after[[0, *range(2, 22)]], before[[0, *range(2, 22)]])


@pytest.mark.parametrize("bad", [-1, 1 << 30])
def test_a_row_with_a_bad_table_is_nan_and_the_others_are_not(
    device: torch.device, bad: int
) -> None:
    case = make([(40, 1), (513, 1), (30, 40), (3, 2)], dims=(16, 16), device=device)
    before = case.run()
    case.tables[1][3], case.tables[2][0] = bad, bad
    after = case.run()
    assert after[1:42].isnan().all()
    assert torch.equal(after[[0, 42, 43]], before[[0, 42, 43]])


def test_a_row_whose_table_is_too_short_is_nan(device: torch.device) -> None:
    query, cache = torch.ones(2, 1, 16, device=device), torch.ones(3, 1, 4, 16, device=device)
    for window in (None, 2):
        batch = PagedBatch(
            *(torch.tensor(x).int() for x in ([[0, 1], [0, 1]], [0, 1, 2], [8, 600]))
        ).to(device)
        out = paged_attention(query, cache, cache, batch, scale=1.0, window=window)
        assert out[1].isnan().all()
        assert (out[0] == 1).all()


def test_rows_and_steps_without_queries(device: torch.device) -> None:
    case = make([(40, 2), (9, 1)], dims=(16, 16), device=device)
    assert torch.equal(case.attend(case.query_NHD, [(0, 40, 2), (1, 9, 0), (1, 9, 1)]), case.run())
    assert case.attend(case.query_NHD[:0], [(0, 40, 0)]).shape == (0, 4, 16)
    assert case.run([]).shape == (0, 4, 16)


def test_lengths_and_tables_may_change_in_place(device: torch.device) -> None:
    """As a step that is replayed has them."""
    query, cache = (
        torch.ones(1, 1, 16, device=device),
        torch.arange(4.0, device=device)[:, None, None, None],
    )
    cache = cache.expand(4, 1, 2, 16).contiguous()
    batch = PagedBatch(*(torch.tensor(x).int() for x in ([[0, 1, 2]], [0, 1], [2]))).to(device)
    assert (paged_attention(query, cache, cache, batch, scale=1.0) == 0).all()
    batch.lengths_B.fill_(6)
    batch.tables_BM.fill_(3)
    assert (paged_attention(query, cache, cache, batch, scale=1.0) == 3).all()


def test_a_batch_moves_whole(device: torch.device) -> None:
    parts = [torch.tensor(x).int() for x in ([[0, 1, 2], [3, 4, 5]], [0, 1, 3], [6, 5])]
    moved = PagedBatch(*parts).to(device)
    for here, there in zip(parts, (moved.tables_BM, moved.starts, moved.lengths_B), strict=True):
        assert there.device.type == device.type
        assert torch.equal(there.cpu(), here)
    assert moved.num_tokens == 3


@pytest.mark.parametrize(
    ("group", "short", "long"), [(1, 16, 64), (4, 16, 64), (7, 16, 32), (128, 64, 64), (3, 0, 64)]
)
def test_every_line_is_in_one_tile(device: torch.device, group: int, short: int, long: int) -> None:
    lengths = [1, 0, 5, 200, 1, 16, 17, 64]
    tiles = Spans.of(lengths, device).tiles(group, short, long)
    seen: set[tuple[int, int]] = set()
    for number, (row, start, queries, first) in enumerate(tiles.tiles_T4.tolist()):
        assert (start, queries) == (sum(lengths[:row]), lengths[row])
        lines = queries * group
        is_long = number < tiles.num_long
        assert is_long == (not short or lines > max(long, group))
        held = set(range(first, min(first + (long if is_long else short), lines)))
        assert is_long or len(held) <= tiles.short_lines
        assert held
        assert not seen & {(row, line) for line in held}
        seen |= {(row, line) for line in held}
    assert len(seen) == sum(lengths) * group
    assert len(tiles.tiles_T4) == tiles.num_long + tiles.num_short


def test_bounds_that_fall_are_refused() -> None:
    with refuses(KernelError, "starts[2]"):
        Spans((0, 3, 1))
    with refuses(KernelError, "starts[0]"):
        Spans((2, 3))
