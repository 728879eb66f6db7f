"""The simulator: against what queueing theory says, and against cases that can be computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_planner.outcome import SimulationOutcome, Slo, gap
from motet_planner.policy import RolePolicy
from motet_planner.simulator import Scenario, simulate
from motet_planner.sizing import Demand, size
from motet_planner.speed import Speed
from motet_planner.traces import read_trace
from motet_planner.traffic import (
    DAY,
    Arrival,
    bursts,
    daily,
    fixed,
    generate,
    lognormal,
    ramp,
    steady,
)
from motet_shared.errors import ConfigError
from motet_shared.quantiles import quantile
from support.running.refusals import refuses

FLAT = Speed(prefill_token=1e-3, steps=[(1, 0.01)], prefill_share=0.0)


def poisson(rate: float, seconds: float, prompt: int, output: int, seed: int = 0) -> list[Arrival]:
    return list(generate(*steady(rate), seconds, fixed(prompt), fixed(output), seed))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


# -------------------------------------------------------------------------------------------------------------- theory
def erlang_wait(servers: int, load: float) -> float:
    """Mean wait in M/M/c, in service times; `load`: of all servers together."""
    terms = [load**n / math.factorial(n) for n in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(terms) + last) / (servers - load)


def cosmetatos(servers: int, load: float) -> float:
    """Mean wait in M/D/c, in service times; exact for one server (Cosmetatos 1975)."""
    use = load / servers
    more = (1 - use) * (servers - 1) * (math.sqrt(4 + 5 * servers) - 2) / (16 * use * servers)
    return 0.5 * (1 + more) * erlang_wait(servers, load)


@pytest.mark.parametrize(("servers", "use"), [(1, 0.5), (1, 0.8), (4, 0.8), (16, 0.9)])
def test_prompts_queue_as_in_m_d_c(servers: int, use: float) -> None:
    """A prompt takes a second and the reply is its first token, so each instance is a server of fixed service time."""
    rate = servers * use
    outcome = simulate(
        Scenario(speed=FLAT, instances=servers), poisson(rate, 25_000 / rate, 1000, 1)
    )
    assert mean(outcome.ttft) - 1 == pytest.approx(cosmetatos(servers, rate), rel=0.15)


def test_replies_without_a_limit_are_m_d_infinity() -> None:
    """As many at a time as come in the time that one takes."""
    speed = Speed(prefill_token=1e-9, steps=[(1, 0.01)], max_running=500)
    outcome = simulate(Scenario(speed=speed), poisson(5.0, 4000.0, 10, 101))
    assert outcome.itl[0] == pytest.approx(outcome.itl[-1]) == pytest.approx(0.01)
    streams = sum(job.ended - job.at for job in outcome.jobs) / 4000
    assert streams == pytest.approx(5.0 * 1.0, rel=0.05)


# ------------------------------------------------------------------------------------------------------------- by hand
def arrivals(*requests: tuple[float, int, int]) -> list[Arrival]:
    return [Arrival(*request) for request in requests]


def times(outcome: SimulationOutcome) -> list[tuple[float, float]]:
    """(first token, end) of each request."""
    return [(round(job.first, 6), round(job.ended, 6)) for job in outcome.jobs]


def test_prompts_one_after_the_other_replies_together() -> None:
    found = simulate(Scenario(speed=FLAT), arrivals((0, 1000, 11), (0.5, 500, 21)))
    assert times(found) == [(1.0, 1.1), (1.5, 1.7)]


def test_a_step_is_longer_with_more_in_it() -> None:
    speed = Speed(prefill_token=1e-9, steps=[(1, 0.01), (3, 0.03)], prefill_share=0.0)
    assert [speed.step(n) for n in (0, 1, 2, 3, 5)] == pytest.approx([0.01, 0.01, 0.02, 0.03, 0.05])
    found = simulate(Scenario(speed=speed), arrivals((0, 1, 101), (0.5, 1, 26)))
    # Alone for 50 tokens, then together at half the speed for 25, then alone again.
    assert times(found)[1] == (0.5, 1.0)
    assert times(found)[0] == (0.0, 1.25)


def test_prefilling_slows_down_and_is_slowed_down() -> None:
    speed = Speed(prefill_token=1e-3, steps=[(1, 0.01)], prefill_share=0.25)
    found = simulate(Scenario(speed=speed), arrivals((0, 1000, 201), (1.0, 250, 2)))
    # The second prompt has a quarter of the time, so it takes a second, in which the first gets 75 tokens of 100.
    assert times(found) == [(1.0, 3.25), (2.0, 2.01)]


def test_no_more_run_than_there_is_room_for() -> None:
    one = Speed(prefill_token=1e-3, steps=[(1, 0.01)], max_running=1, prefill_share=0.0)
    cache = Speed(prefill_token=1e-3, steps=[(1, 0.01)], kv_tokens=300, prefill_share=0.0)
    requests = arrivals((0, 100, 101), (0, 100, 101))
    for speed in (one, cache):
        assert times(simulate(Scenario(speed=speed), requests)) == [(0.1, 1.1), (1.2, 2.2)]
    huge = simulate(Scenario(speed=cache), arrivals((0, 1000, 11)))
    assert times(huge) == [(1.0, 1.1)], "one that is larger than the cache runs alone"


def test_a_prefix_cache_and_the_way_there() -> None:
    speed = Speed(prefill_token=1e-3, steps=[(1, 0.01)], cached=0.5, overhead=0.2)
    assert simulate(Scenario(speed=speed), arrivals((0, 1000, 1))).ttft == pytest.approx([0.7])


def test_the_first_request_is_held_while_the_first_instance_starts() -> None:
    policy = RolePolicy(
        min=0, max=3, target=4, window=10, burst_window=2, scale_down_delay=5, cold_start=7
    )
    scenario = Scenario(
        speed=FLAT, policy=policy, instances=0, cold_start=7.0, interval=1.0, max_wait=30.0
    )
    found = simulate(scenario, arrivals((3.5, 100, 11), (60.0, 100, 11)), 100.0)
    # Seen at the next look, ready seven seconds later; silence ends it, and the next request starts it again.
    assert times(found) == [(11.1, 11.2), (67.1, 67.2)]
    assert [requested for _, _, requested in found.replicas.points][:5] == [0, 1, 1, 0, 1]
    assert found.unserved == 0
    hasty = simulate(
        Scenario(speed=FLAT, policy=policy, instances=0, cold_start=7.0, max_wait=2.0),
        arrivals((0, 9, 9)),
    )
    assert (hasty.unserved, hasty.share(Slo())) == (1, 0.0)


def test_instances_that_go_finish_what_they_have() -> None:
    policy = RolePolicy(
        min=1, max=9, target=1, window=2, burst_window=1, scale_down_delay=2, cold_start=1
    )
    requests = arrivals(*[(1.0, 10, 2001)] * 6)
    found = simulate(Scenario(speed=FLAT, policy=policy, cold_start=1.0, interval=0.5), requests)
    assert all(job.ended > 0 for job in found.jobs)
    assert found.replicas.most > 1


# ---------------------------------------------------------------------------------------------------------- properties
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(0.5, 8),
    running=st.integers(1, 20),
    cache=st.sampled_from([0, 2000]),
    share=st.sampled_from([0.0, 0.44]),
    autoscaled=st.booleans(),
    sample=st.integers(1, 3),
)
@settings(max_examples=40)
def test_nothing_is_lost_and_the_same_seed_gives_the_same(
    autoscaled: bool, sample: int, **case: Any
) -> None:
    speed = Speed(
        prefill_token=2e-4,
        steps=[(1, 0.01), (16, 0.03)],
        max_running=case["running"],
        kv_tokens=case["cache"],
        prefill_share=case["share"],
    )
    policy = RolePolicy(
        min=0, max=12, target=4, window=10, burst_window=2, scale_down_delay=10, cold_start=3
    )
    scenario = Scenario(
        speed=speed,
        policy=policy if autoscaled else None,
        instances=2,
        cold_start=3.0,
        sample=sample,
    )
    traffic = list(
        generate(
            *steady(case["rate"]),
            40,
            lognormal(200, 0.8, 900),
            lognormal(40, 0.8, 400),
            case["seed"],
        )
    )
    found, again = simulate(scenario, traffic, 40.0), simulate(scenario, traffic, 40.0)
    assert found.requests == len(traffic) * sample
    assert found.unserved == 0
    for job in found.jobs:
        assert job.at + job.prompt * speed.prefill_token <= job.first + 1e-6
        assert job.first <= job.ended
        assert job.output == 1 or gap(job) >= 0.01 - 1e-9
    assert (found.ttft, found.itl, found.instance_seconds) == (
        again.ttft,
        again.itl,
        again.instance_seconds,
    )
    assert found.replicas.points == again.replicas.points


def test_a_sample_of_a_large_fleet_tells_of_the_whole() -> None:
    speed = Speed(prefill_token=1e-4, steps=[(1, 0.01), (32, 0.03)])
    whole, part = (
        simulate(
            Scenario(speed=speed, instances=40, sample=sample),
            generate(
                *steady(160 / sample), 60, lognormal(300, 0.5, 2000), lognormal(80, 0.5, 500), 1
            ),
            60.0,
        )
        for sample in (1, 4)
    )
    assert part.instance_seconds == pytest.approx(whole.instance_seconds, rel=0.05)
    assert part.requests == pytest.approx(whole.requests, rel=0.05)
    assert quantile(part.itl, 0.5) == pytest.approx(quantile(whole.itl, 0.5), rel=0.05)


# ------------------------------------------------------------------------------------------------------------- traffic
@pytest.mark.parametrize(
    "shape",
    [steady(5.0), ramp(5.0, 2000.0), bursts(5.0, 200.0, 20.0), daily(5.0)],
    ids=["steady", "ramp", "bursts", "day"],
)
def test_traffic_has_its_mean_and_its_maximum(shape: Any) -> None:
    rate, most = shape
    seconds = DAY if rate(0) == daily(5.0)[0](0) else 2000.0
    every = [rate(seconds * i / 1000) for i in range(1000)]
    assert mean(every) == pytest.approx(5.0, rel=0.02)
    assert max(every) <= most * (1 + 1e-9)
    some = list(generate(rate, most, 2000.0, fixed(7), fixed(3), 0))
    assert some == sorted(some)
    assert {(r.prompt, r.output) for r in some} == {(7, 3)}
    assert len(some) == pytest.approx(sum(rate(t) for t in range(2000)), rel=0.1)


OURS = """{"arrival": 10.5, "tokens": 100, "max_tokens": 8, "prefix": "a", "prefix_tokens": 20}

{"arrival": 10, "tokens": 5, "max_tokens": 2}
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 50, "output_length": 4, "hash_ids": [1]}
{"timestamp": 1500, "input_length": 6, "output_length": 1}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,396,0
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OURS, [(0.0, 5, 2), (0.5, 120, 8)]),
        (MOONCAKE, [(0.0, 50, 4), (0.5, 6, 1)]),
        (AZURE, [(0.0, 374, 44), (1.0, 396, 1)]),
    ],
)
def test_traces_are_read(tmp_path: Path, text: str, expected: list[tuple[float, int, int]]) -> None:
    (tmp_path / "trace").write_text(text)
    found = read_trace(tmp_path / "trace")
    assert [(round(r.at, 4), r.prompt, r.output) for r in found] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request"),
        (
            '{"arrival": 1, "tokens": 5, "max_tokens": 2}\n{"arrival": 1}',
            "line 2 of .*missing required field",
        ),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 2}',
            "line 1 of .*at least 0, lengths at least 1",
        ),
        ("TIMESTAMP,ContextTokens\n", "has no column GeneratedTokens"),
        (AZURE + "yesterday,1,1\n", "line 4 of .*yesterday"),
        (AZURE + "2023-11-16 18:15:46,1\n", "line 4 of .*2 columns instead of 3"),
    ],
)
def test_broken_traces_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace").write_text(text)
    with refuses(ConfigError, "traffic"):
        read_trace(tmp_path / "trace")


# -------------------------------------------------------------------------------------------------------------- sizing
def demand(rate: float, slo: Slo, seconds: float = 120.0) -> Demand:
    lengths = lognormal(400, 0.5, 2000), lognormal(60, 0.5, 400)
    return Demand(
        traffic=lambda: generate(*steady(rate), seconds, *lengths, 3),
        seconds=seconds,
        slo=slo,
    )


def test_sizing_finds_the_fewest_instances() -> None:
    speed = Speed(prefill_token=5e-4, steps=[(1, 0.01), (32, 0.04)])
    requested = demand(20.0, Slo(ttft=1.0, itl=0.05))
    found = size(requested, speed, cold_start=10.0)
    assert found is not None
    assert found.fixed.share(requested.slo) >= 0.99
    fewer = simulate(
        Scenario(speed=speed, instances=found.instances - 1, max_wait=math.inf),
        requested.traffic(),
        120.0,
    )
    assert fewer.share(requested.slo) < 0.99
    residence = mean([job.ended - job.at for job in found.fixed.jobs])
    assert found.streams * found.instances == pytest.approx(20 * residence, rel=0.5), (
        "Little's law, at the busiest time"
    )
    assert found.fixed.instance_seconds == pytest.approx(found.instances * found.fixed.span)
    output, total = found.fixed.per_million(2.0)
    assert output == pytest.approx(
        found.fixed.instance_seconds / 3600 * 2 / found.fixed.output_tokens * 1e6
    )
    assert total < output


def test_sizing_says_where_no_number_is_enough() -> None:
    speed = Speed(prefill_token=5e-4, steps=[(1, 0.06)])
    assert size(demand(1.0, Slo(itl=0.05)), speed, 10.0) is None
    assert size(demand(1.0, Slo(ttft=0.05)), speed, 10.0) is None
    assert size(demand(1.0, Slo(itl=0.07)), speed, 10.0) is not None


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [(2, 0.1), (1, 0.1)]}, "steps"),
        ({"prefill_token": -1}, "prefill_token"),
        ({"prefill_share": 1}, "prefill_share"),
        ({"max_running": 0}, "max_running"),
    ],
)
def test_wrong_speeds_are_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    with refuses(ConfigError, param):
        Speed(**{"prefill_token": 1e-3, "steps": [(1, 0.01)], **wrong})
