"""The rules of the planner: what they promise of any load, and what they do in cases that can be told in advance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_planner.history import History, Sample
from motet_planner.policy import Decision, Policy, RolePolicy
from motet_shared.errors import ConfigError
from support.running.refusals import refuses

EVERY = 2.0
PLAIN = RolePolicy(
    min=0,
    max=40,
    target=4.0,
    window=20.0,
    burst_window=4.0,
    scale_down_delay=30.0,
    cold_start=10.0,
    slack=0.1,
)


def run(policy: RolePolicy, samples: Iterable[Sample]) -> list[Decision]:
    generated = Policy(policy)
    return [generated.decide(sample) for sample in samples]


def load(values: Iterable[tuple[int, float, float]], ready: int = 0) -> list[Sample]:
    """(arrivals, running, waiting) every two seconds."""
    return [
        Sample(at=EVERY * number, arrivals=arrivals, running=running, waiting=waiting, ready=ready)
        for number, (arrivals, running, waiting) in enumerate(values)
    ]


def targets(decisions: Iterable[Decision]) -> list[int]:
    return [decision.target for decision in decisions]


def constant(count: float, steps: int) -> list[tuple[int, float, float]]:
    return [(math.ceil(count), count, 0.0)] * steps


# ---------------------------------------------------------------------------------------------------------- properties
POLICIES = st.builds(
    lambda low, more, target, window, share, delay, slack, cold, up, down: RolePolicy(
        min=low,
        max=max(1, low + more),
        target=target,
        window=window,
        burst_window=window * share,
        scale_down_delay=delay,
        slack=slack,
        cold_start=cold,
        step_up=up,
        step_down=down,
    ),
    st.integers(0, 5),
    st.integers(0, 30),
    st.floats(0.2, 50),
    st.floats(2, 120),
    st.floats(0.05, 1),
    st.floats(0, 100),
    st.floats(0, 0.5),
    st.floats(0, 60),
    st.integers(1, 8),
    st.integers(1, 8),
)
LOADS = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 300), st.integers(0, 300)),
    min_size=1,
    max_size=80,
)


@given(POLICIES, LOADS, st.integers(0, 60))
def test_never_outside_of_min_and_max(policy: RolePolicy, values: list[Any], ready: int) -> None:
    assert all(
        policy.min <= decision.target <= policy.max for decision in run(policy, load(values, ready))
    )


@given(POLICIES, LOADS, st.integers(2, 5), st.integers(0, 10))
def test_more_load_never_has_fewer_instances(
    policy: RolePolicy, values: list[Any], times: int, ready: int
) -> None:
    policy = replace(policy, max=10**6)
    more = [tuple(times * value for value in each) for each in values]
    few, many = targets(run(policy, load(values, ready))), targets(run(policy, load(more, ready)))
    assert all(a <= b for a, b in zip(few, many, strict=True))


@given(POLICIES, LOADS, st.integers(0, 60))
def test_steps_are_bounded(policy: RolePolicy, values: list[Any], ready: int) -> None:
    for decision in run(policy, load(values, ready))[1:]:
        assert decision.target - decision.before <= max(policy.step_up, decision.before)
        assert decision.before - decision.target <= max(policy.step_down, decision.before // 4)


@given(POLICIES, LOADS, st.integers(0, 60))
def test_what_goes_was_not_needed_for_the_whole_delay(
    policy: RolePolicy, values: list[Any], ready: int
) -> None:
    policy = replace(policy, max=10**6)
    decisions = run(policy, load(values, ready))
    delay = max(policy.scale_down_delay, policy.cold_start)
    for number, decision in enumerate(decisions):
        if decision.target >= decision.before:
            continue
        now = EVERY * number
        assert number == 0 or now > delay, "nothing goes before the delay has passed once"
        lately = [d for i, d in enumerate(decisions[: number + 1]) if EVERY * i >= now - delay]
        assert all(earlier.demand.largest()[0] <= decision.target for earlier in lately)


@given(POLICIES, st.floats(0.1, 300), st.integers(0, 40))
def test_constant_load_comes_to_rest(policy: RolePolicy, count: float, ready: int) -> None:
    steps = 300
    found = targets(run(policy, load(constant(count, steps), ready)))
    changes = [b - a for a, b in itertools.pairwise(found) if a != b]
    # At most once up and then once down (what was there at first, or a first guess), each in bounded steps.
    assert sum(a * b < 0 for a, b in itertools.pairwise(changes)) <= 1
    assert len(set(found[-50:])) == 1


@given(POLICIES, st.integers(1, 50))
def test_the_first_request_calls_for_an_instance(policy: RolePolicy, waiting: int) -> None:
    policy = replace(policy, min=0)
    quiet = constant(0, 20)
    found = targets(run(policy, load([*quiet, (0, 0.0, float(waiting))])))
    assert found[:20] == [0] * 20
    assert found[20] >= 1
    assert targets(run(policy, load([*quiet, (1, 0.0, 0.0)])))[20] == 1, (
        "one that was answered between two looks"
    )


@given(st.integers(0, 80), st.integers(0, 4), st.floats(1, 4))
@settings(max_examples=30)
def test_noise_around_a_constant_load_does_not_flap(seed: int, mean: int, spread: float) -> None:
    """A load that wavers, by less than the slack forgives, between two numbers of instances."""
    base = PLAIN.target * (mean + 1) * 0.97
    wave = [base + 0.3 * PLAIN.slack * base * math.sin(spread * (seed + i)) for i in range(200)]
    found = targets(run(PLAIN, load([(int(v), v, 0.0) for v in wave], ready=mean + 1)))
    assert len(set(found[40:])) == 1


# --------------------------------------------------------------------------------------------------------------- cases
def test_a_burst_is_answered_at_once_and_ends_after_the_delay() -> None:
    found = targets(
        run(PLAIN, load([*constant(4, 20), *constant(40, 5), *constant(4, 60)], ready=1))
    )
    assert found[19] == 1
    assert found[20] > 1, "the first look that sees it"
    assert max(found) >= 7, "ten times the load, with headroom 1.5"
    last_high = max(i for i, target in enumerate(found) if target == max(found))
    assert EVERY * (last_high - 24) >= 30, "kept for the scale-down delay after its end"
    assert found[-1] <= 2


def test_growth_is_met_before_it_is_there() -> None:
    """Arrivals that grow evenly: with a longer cold start the same load calls for more instances."""
    growing = [(10 + 6 * i, 10.0 + 6 * i, 0.0) for i in range(12)]
    quick, slow = (
        targets(run(replace(PLAIN, cold_start=cold), load(growing, ready=2)))
        for cold in (0.0, 20.0)
    )
    assert all(a <= b for a, b in zip(quick, slow, strict=True))
    assert slow[-1] > quick[-1]
    measured = [replace(sample, cold_start=20.0) for sample in load(growing, ready=2)]
    assert targets(run(replace(PLAIN, cold_start=0.0), measured)) == slow, "what is measured counts"


def test_a_poisson_process_is_no_trend() -> None:
    history = History(20.0)
    for sample in load([(n, 10.0, 0.0) for n in (9, 11, 8, 12, 10, 13, 9, 11, 12, 10)]):
        history.add(sample)
    assert history.forecast_running(20.0, 60.0) == pytest.approx(10.0)


def test_it_takes_over_what_it_finds_and_lets_go_slowly() -> None:
    decisions = run(replace(PLAIN, min=1), load(constant(0, 60), ready=9))
    assert decisions[0].before == 9
    found = targets(decisions)
    assert found[15] == 9
    assert found[-1] == 1
    assert min(b - a for a, b in itertools.pairwise(found)) >= -2


def test_zero_only_after_silence() -> None:
    found = targets(run(PLAIN, load([*constant(1, 3), *constant(0, 60)], ready=1)))
    zero = found.index(0)
    assert EVERY * zero >= 30 + PLAIN.window
    assert set(found[zero:]) == {0}


def test_tokens_per_second_count_where_they_are_given() -> None:
    samples = [replace(sample, tokens=2000.0) for sample in load(constant(2, 10), ready=1)]
    assert targets(run(PLAIN, samples))[-1] == 1
    assert targets(run(replace(PLAIN, tokens=200.0), samples))[-1] == 5


def test_reasons_are_told() -> None:
    decisions = run(replace(PLAIN, max=3), load([*constant(1, 3), *constant(90, 2)], ready=1))
    assert decisions[1].reason == "enough"
    assert "load needs" in decisions[3].reason
    assert "max is 3" in decisions[-1].reason


def test_time_does_not_go_back() -> None:
    generated = Policy(PLAIN)
    generated.decide(Sample(at=5.0))
    with pytest.raises(ValueError, match="5"):
        generated.decide(Sample(at=5.0))


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"min": -1}, "min"),
        ({"max": 0}, "max"),
        ({"min": 9, "max": 8}, "min"),
        ({"target": 0}, "target"),
        ({"window": math.nan}, "window"),
        ({"burst_window": 90}, "burst_window"),
        ({"headroom": 0.5}, "headroom"),
        ({"step_down": 0}, "step_down"),
    ],
)
def test_wrong_settings_are_refused_by_name(wrong: dict[str, Any], param: str) -> None:
    build: Callable[..., RolePolicy] = RolePolicy
    with refuses(ConfigError, param):
        build(**wrong)
