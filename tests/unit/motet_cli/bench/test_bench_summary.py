"""Test the figures of `motet bench`: percentiles (against numpy), latencies, goodput, cost, stages."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_cli.bench.load import Measured
from motet_cli.bench.results.record import Record
from motet_cli.bench.results.statistics import Spread, percentile
from motet_cli.bench.results.summary import Limits, Summary, summarize
from motet_cli.bench.results.table import warnings

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


def record(number: int = 0, **fields: Any) -> Record:
    """Return a record sent at 1 s with tokens at 1.5, 1.6, 1.8 and 2.0 s, ended at 2.1 s."""
    usual = {
        "due": 1.0,
        "sent": 1.0,
        "times": [1.5, 1.6, 1.8, 2.0],
        "events": [1, 1, 1, 1],
        "ended": 2.1,
    }
    return Record(number, **{**usual, "tokens": 4, "prompt_tokens": 10, **fields})


def summary(*records: Record, limits: Limits | None = None, **fields: Any) -> Summary:
    measured = Measured(list(records), seconds=fields.pop("seconds", 2.0), **fields)
    return summarize(measured, limits or Limits(), 3.6, paced=True)


# ------------------------------------------------------------------------------------------------------ percentiles
@given(VALUES, st.floats(0, 100))
def test_percentiles_match_numpy(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share))
    assert math.isclose(percentile(sorted(values), share), expected, rel_tol=1e-9, abs_tol=1e-9)


@given(VALUES)
def test_spreads_match_numpy(values: list[float]) -> None:
    found = Spread.of(values)
    assert found.count == len(values)
    assert math.isclose(found.mean, float(np.mean(values)), rel_tol=1e-9, abs_tol=1e-9)
    assert (found.min, found.max) == (min(values), max(values))
    for name, share in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert math.isclose(
            getattr(found, name), float(np.percentile(values, share)), rel_tol=1e-9, abs_tol=1e-9
        )


def test_empty_distributions() -> None:
    assert Spread.of([]) == Spread()
    with pytest.raises(ValueError, match="ordered"):
        percentile([], 50)


# ---------------------------------------------------------------------------------------------------- one request
def test_latencies_of_a_request() -> None:
    one = record()
    assert one.ttft == pytest.approx(0.5)
    assert one.e2e == pytest.approx(1.1)
    assert one.tpot == pytest.approx(0.5 / 3)
    assert one.gaps == pytest.approx([0.1, 0.2, 0.2])
    assert one.token_gaps == pytest.approx(one.gaps)
    assert one.plumbing is None


def test_tokens_of_one_read_share_its_gap() -> None:
    # Two events with each read after the first, and by usage two tokens in each event.
    one = record(times=[1.0, 1.4], events=[1, 2], tokens=6)
    assert one.gaps == pytest.approx([0.4])
    assert one.token_gaps == pytest.approx([0.1, 0.1])
    assert one.tpot == pytest.approx(0.4 / 5)


def test_events_count_as_tokens_without_usage() -> None:
    one = record(tokens=None)
    assert one.output_tokens == 4
    found = summary(one)
    assert (found.output_tokens, found.counted) == (4, "events")
    assert any("usage" in line for line in warnings(found))


def test_an_empty_reply_has_no_first_token() -> None:
    one = record(times=[], events=[], tokens=0)
    assert (one.ttft, one.tpot, one.gaps) == (None, None, [])
    assert summary(one).ttft.count == 0


# -------------------------------------------------------------------------------------------------------- all of them
def test_throughput_and_cost() -> None:
    found = summary(record(), record(1, cached_tokens=5), seconds=2.0)
    assert (found.sent, found.completed, found.failed) == (2, 2, 0)
    assert (found.requests_per_second, found.output_tokens_per_second) == (1.0, 4.0)
    assert (found.input_tokens, found.cached_tokens, found.output_tokens) == (20, 5, 8)
    assert found.cost is not None
    # 3.6 an hour are 0.001 a second: 0.002 for 8 tokens.
    assert found.cost.per_million_output == pytest.approx(250.0)
    assert found.cost.per_million_total == pytest.approx(0.002 / 28 * 1e6)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), True),
        (Limits(ttft=0.51, itl=0.21, e2e=1.11), True),
        (Limits(ttft=0.49), False),
        (Limits(itl=0.19), False),
        (Limits(e2e=1.0), False),
    ],
)
def test_goodput_needs_all_limits_met(limits: Limits, good: bool) -> None:
    assert limits.met_by(record()) is good
    assert not limits.met_by(record(error="timeout"))


def test_goodput_limits_the_p95_gap_of_a_request() -> None:
    times = [1.0 + 0.01 * number for number in range(101)] + [3.0]
    hiccup = record(times=times, events=[1] * 102, tokens=102)
    assert Limits(itl=0.02).met_by(hiccup), "one gap of a hundred"


def test_goodput_is_a_share_of_ended_requests() -> None:
    records = [
        record(),
        record(1, ended=9.0),
        record(2, error="timeout"),
        record(3, error="interrupted"),
    ]
    found = summary(*records, limits=Limits(e2e=2.0), seconds=4.0)
    assert found.goodput.requests == 1
    assert found.goodput.share == pytest.approx(1 / 3)
    assert found.goodput.requests_per_second == 0.25
    assert (found.sent, found.completed, found.failed, found.unfinished) == (4, 2, 1, 1)


def test_failures_are_counted_by_kind() -> None:
    failed = [record(n, error="429 overloaded", message=f"full {n}") for n in range(2)]
    found = summary(record(9), *failed, record(8, error="timeout", message="slow"))
    assert [(f.kind, f.count, f.message) for f in found.failures] == [
        ("429 overloaded", 2, "full 0"),
        ("timeout", 1, "slow"),
    ]
    assert found.e2e.count == 1, "latencies are of complete replies"


def test_engine_time_is_separated_from_plumbing() -> None:
    timing = {
        "decode.queue": 0.1,
        "decode.prefill": 0.3,
        "decode.decode": 0.6,
        "decode.model": 0.5,
        "gateway.total": 1,
    }
    found = summary(record(timing=timing), record(1))
    assert {name: spread.mean for name, spread in found.stages.items()} == pytest.approx(
        {"queue": 0.1, "prefill": 0.3, "decode": 0.6, "plumbing": 0.1, "model": 0.5}
    )
    assert summary(record()).stages == {}


def test_a_slow_client_is_reported() -> None:
    assert not summary(record(), cpu_seconds=0.5, lags=[0.001]).client.bottleneck
    for slow in (
        summary(record(), cpu_seconds=1.9),
        summary(record(), lags=[0.1] * 50),
        summary(record(due=0.5)),
    ):
        assert slow.client.bottleneck
        assert any("bottleneck" in line for line in warnings(slow))
    assert summary(record(), cpu_seconds=0.5).client.cpu_us_per_event == pytest.approx(125_000)
