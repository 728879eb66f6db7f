"""Paged attention on every instruction set of this CPU and in torch, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motet_kernels.attention.paged_attention import paged_attention
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.runtime.errors import KernelError
from support.engine.paged_cases import Case, make
from support.running.refusals import refuses

# Around the sizes of blocks, key blocks and segments.
EARLIER = st.sampled_from([0, 1, 3, 15, 16, 40, 63, 64, 130, 511, 600, 1100])
QUERIES = st.sampled_from([1, 1, 1, 2, 5, 16, 33, 70])


def near(case: Case, backend: str) -> float:
    """Return how far results may be from float64's.

    Beside a bfloat16 cache, queries and weights of keys are rounded to it where the processor multiplies pairs of such
    numbers, if those fill its vectors: 2^-9 of a query and of a weight at most.
    """
    dims = case.key_PKSD.shape[-1], case.value_PKSV.shape[-1]
    paired = case.key_PKSD.dtype == torch.bfloat16 and not any(dim % 32 for dim in dims)
    if backend not in ("amx", "avx512bf16") or not paired:
        return 1e-5
    return max(float(values.abs().max()) for values in case.values_B) / 32


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(EARLIER, QUERIES), max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (5, 5), (40, 1)]),
    dims=st.sampled_from([(16, 16), (64, 64), (24, 24), (7, 5), (48, 80), (20, 130)]),
    slots=st.sampled_from([1, 4, 16, 48]),
    cache=st.sampled_from([torch.float32, torch.bfloat16]),
    sight=st.sampled_from(
        [{}, {}, {"window": 1}, {"window": 5}, {"window": 70}, {"window": 600}, {"causal": False}]
    ),
    softcap=st.sampled_from([None, None, 3.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_is_attention(
    backend: str, heads: tuple[int, int], sinks: bool, sight: dict[str, Any], **chosen: Any
) -> None:
    case = make(heads=heads, sinks_H=torch.randn(heads[0]) if sinks else None, **sight, **chosen)
    out = case.run()
    assert out.shape == (case.query_NHD.shape[0], heads[0], chosen["dims"][1])
    assert out.dtype == torch.float32
    if len(out):
        within = near(case, backend)
        torch.testing.assert_close(out.double(), case.expected(), rtol=1e-5, atol=within)


def test_rounding_to_bfloat16_costs_less_than_a_hundredth(isa: str) -> None:
    case = make(
        [(0, 70), (600, 33), (90, 1)], heads=(8, 2), dims=(128, 64), dtype=torch.bfloat16,
        cache=torch.bfloat16,
    )  # fmt: skip
    out, right = case.run().double(), case.expected()
    assert float((out - right).norm() / right.norm()) < 5e-3


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
def test_the_output_is_of_the_queries_type(backend: str, cache: torch.dtype) -> None:
    case = make([(30, 3), (100, 1)], dtype=torch.bfloat16, cache=cache)
    out = case.run()
    assert out.dtype == torch.bfloat16
    within = max(1e-6, near(case, backend) - 1e-5)
    torch.testing.assert_close(out, case.expected().bfloat16(), rtol=1 / 128, atol=within)


@pytest.mark.parametrize("rows", [[(200, 1), (3, 1)], [(90, 40), (650, 1)]])
@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(48, 32), (40, 24), (96, 64)])
def test_values_may_be_a_view_of_the_keys(
    backend: str, rows: list[tuple[int, int]], cache: torch.dtype, dims: tuple[int, int]
) -> None:
    case = make(rows, heads=(8, 1), dims=dims, cache=cache, shared=True)
    within = near(case, backend)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-5, atol=within)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_large_scores_do_not_overflow(backend: str, softcap: float | None) -> None:
    case = make([(70, 5), (600, 1)], scale=200.0, softcap=softcap)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-4, atol=1e-4)


@settings(max_examples=15)
@given(
    rows=st.lists(st.tuples(EARLIER, QUERIES), min_size=2, max_size=5),
    options=st.sampled_from(
        [{}, {"window": 90}, {"softcap": 5.0, "sinks_H": torch.ones(4)}, {"causal": False}]
    ),
    cache=st.sampled_from([torch.float32, torch.bfloat16]),
    dims=st.sampled_from([(32, 32), (24, 40)]),
    threads=st.integers(1, 3),
    data=st.data(),
)
def test_company_changes_no_bit(
    isa: str,
    rows: list[tuple[int, int]],
    options: dict[str, Any],
    threads: int,
    data: st.DataObject,
    **chosen: Any,
) -> None:
    case = make(rows, **chosen, **options)
    together = case.run().split([queries for _, queries in rows])
    torch.set_num_threads(threads)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = case.run(order).split([rows[row][1] for row in order])
    for row, out in zip(order, shuffled, strict=True):
        assert torch.equal(out, together[row])
        assert torch.equal(case.run([row]), together[row])
    torch.set_num_threads(1)


@settings(max_examples=15)
@given(
    earlier=st.sampled_from([0, 37, 480]),
    chunks=st.lists(st.sampled_from([1, 2, 7, 33, 64, 90, 200]), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (4, 2), (7, 1)]),
    options=st.sampled_from([{}, {"window": 90}, {"softcap": 5.0}]),
    cache=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_change_no_bit(
    isa: str, earlier: int, chunks: list[int], options: dict[str, Any], **chosen: Any
) -> None:
    case = make([(earlier, sum(chunks))], **chosen, **options)
    whole, done = case.run(), 0
    for chunk in chunks:
        piece = case.attend(case.query_NHD[done : done + chunk], [(0, earlier + done, chunk)])
        assert torch.equal(piece, whole[done : done + chunk])
        done += chunk
    last = done - 1
    assert torch.equal(
        case.attend(case.query_NHD[last:done], [(0, earlier + last, 1)]), whole[last:]
    )


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
def test_nan_stays_in_its_row(backend: str, cache: torch.dtype) -> None:
    case = make([(40, 1), (100, 1), (30, 20)], cache=cache)
    before = case.run()
    case.key_PKSD[case.tables[1][0], :, 3] = math.nan
    case.value_PKSV[case.tables[1][1], :, 3] = math.nan
    after = case.run()
    assert after[1].isnan().all()
    assert torch.equal(after[[0, *range(2, 22)]], before[[0, *range(2, 22)]])


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
def test_nan_stays_with_the_queries_that_see_it(isa: str, cache: torch.dtype) -> None:
    case = make([(30, 100)], cache=cache)
    before = case.run()
    case.value_PKSV[case.tables[0][80 // 16], :, 80 % 16] = math.nan
    after = case.run()
    assert torch.equal(after[:50], before[:50])
    assert after[50:].isnan().all()


def test_a_row_without_queries_takes_no_part(backend: str) -> None:
    case = make([(40, 2), (9, 1)])
    pieces = [(0, 40, 2), (1, 9, 0), (1, 9, 1)]
    assert torch.equal(case.attend(case.query_NHD, pieces), case.run())


def changed(**changes: Any) -> Callable[[], Any]:
    """A call that fits but for what is changed."""
    fitting: dict[str, Any] = {
        "query_NHD": torch.zeros(3, 4, 8),
        "key_PKSD": torch.zeros(5, 2, 4, 8),
        "value_PKSV": torch.zeros(5, 2, 4, 8),
        "tables_BM": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "starts": torch.tensor([0, 1, 3], dtype=torch.int32),
        "lengths_B": torch.tensor([5, 8], dtype=torch.int32),
        "scale": 1.0,
    }

    def call() -> Tensor:
        given = fitting | changes
        batch = PagedBatch(given.pop("tables_BM"), given.pop("starts"), given.pop("lengths_B"))
        return paged_attention(
            given.pop("query_NHD"), given.pop("key_PKSD"), given.pop("value_PKSV"), batch, **given
        )

    return call


def test_what_fits_is_computed(backend: str) -> None:
    assert changed()().shape == (3, 4, 8)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        (
            {"query_NHD": torch.zeros(3, 4, 8).double()},
            "query_NHD",
        ),
        ({"query_NHD": torch.zeros(3, 32)}, "query_NHD"),
        ({"query_NHD": torch.zeros(4, 4, 8)}, "query_NHD"),
        (
            {"query_NHD": torch.zeros(3, 3, 8)},
            "query_NHD",
        ),
        ({"query_NHD": torch.zeros(3, 4, 9)}, "query_NHD"),
        (
            {"query_NHD": torch.zeros(3, 8, 4).transpose(1, 2)},
            "query_NHD",
        ),
        ({"query_NHD": torch.zeros(3, 4, 8, device="meta")}, "query_NHD"),
        ({"value_PKSV": torch.zeros(5, 2, 3, 8)}, "value_PKSV"),
        (
            {"value_PKSV": torch.zeros(5, 2, 4, 8).bfloat16()},
            "value_PKSV",
        ),
        (
            {"tables_BM": torch.zeros(2, 2, dtype=torch.int64)},
            "tables_BM",
        ),
        (
            {"tables_BM": torch.zeros(3, 2, dtype=torch.int32)},
            "starts",
        ),
        (
            {"tables_BM": torch.tensor([[0, 1], [2, 5]]).int()},
            "tables_BM[1]",
        ),
        (
            {"tables_BM": torch.tensor([[0, -1], [2, 3]]).int()},
            "tables_BM[0]",
        ),
        (
            {"lengths_B": torch.tensor([5, 9]).int()},
            "tables_BM[1]",
        ),
        (
            {"lengths_B": torch.tensor([5, 1]).int()},
            "lengths_B[1]",
        ),
        ({"starts": torch.tensor([1, 2, 3]).int()}, "starts[0]"),
        (
            {"starts": torch.tensor([0, 4, 3]).int()},
            "starts[2]",
        ),
        ({"window": 0}, "window"),
        ({"window": 4, "causal": False}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"sinks_H": torch.zeros(3)}, "sinks_H"),
    ],
)
def test_what_does_not_fit_is_named(backend: str, changes: dict[str, Any], param: str) -> None:
    with refuses(KernelError, param):
        changed(**changes)()
