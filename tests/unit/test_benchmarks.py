"""The benchmarks compute what they say, and still run: tiny sizes, no judgement of speed."""

from __future__ import annotations

import pytest

from bench_stack import motet_stack
from fake_engine import CHARS, MODEL
from load_generator import Arrivals, Report
from measures import Ratio, Target, added_latency, quantile, row, rows_table, targets_table


def test_added_latency_pairs_each_token_with_its_emission() -> None:
    # Two tokens had arrived before the measured time; then one, then two at once.
    stream = Arrivals(request="a", counts=[2, 3, 5], times=[0.5, 1.0, 2.0])
    report = Report(tokens=3, events=2, seconds=1.0, cpu={}, streams=[stream])
    emitted = {"a": [0.1, 0.2, 0.75, 1.0, 1.5], "b": [9.0]}
    assert added_latency(report, emitted) == [0.25, 1.0, 0.5]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_quantile_is_a_value_that_was_seen(share: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_row_divides_by_tokens_and_seconds() -> None:
    report = Report(tokens=1000, events=250, seconds=2.0, cpu={"gateway": 0.003, "clients": 0.001})
    found = row("saturated", "sse", 4, report)
    assert (found.tokens_per_second, found.tokens_per_event) == (500.0, 4.0)
    assert found.cpu_us == pytest.approx({"gateway": 3.0, "clients": 1.0})
    assert "| saturated | sse | 4 | 500 | 4.0 | 3.00 | 1.00 |" in rows_table([found])


def test_targets_are_met_on_their_own_side() -> None:
    most, least = Target("cost", 3.1, 3, "µs"), Target("speed", 5.0, 4, "times", most=False)
    assert (most.met, least.met) == (False, True)
    assert "| cost | NO | ≤ 3 µs | 3.10 |" in targets_table([most, least])
    assert Ratio("x", [1.0, 9.0, 5.0]).median == 5.0


@pytest.mark.parametrize("batched", [True, False])
async def test_stack_streams_to_both_kinds_of_clients(batched: bool) -> None:
    rate = 200.0
    async with motet_stack(rate=rate, batched=batched) as stack:
        for clients in ("sse", "websocket"):
            report = await stack.load(
                clients=clients, model=MODEL, streams=3, settle=0.1, seconds=0.3, chars=CHARS, arrivals=True
            )
            assert report.tokens >= report.events > 0
            assert batched or report.tokens == report.events
            assert set(report.cpu) == {"nats", "engine", "tokenizer", "gateway", "clients"}
            added = added_latency(report, await stack.take_emitted(3))
            assert added
            assert min(added) > 0
        report = await stack.load(clients="one", model=MODEL, max_tokens=1, settle=0, seconds=0.2)
        assert report.durations
