"""The arithmetic of the benchmarks of sessions that see, and of omni models: slopes, pauses, targets."""

from __future__ import annotations

import math
from random import Random

import pytest

from benchmarks.omni import eyes, omni
from benchmarks.support.endurance import ratio_interval, slope


def test_a_slope_is_within_its_interval() -> None:
    rng = Random(0)
    times = [float(number) for number in range(60)]
    steady = slope(times, [5.0 + rng.gauss(0, 1) for _ in times])
    growing = slope(times, [5.0 + 0.5 * time + rng.gauss(0, 1) for time in times])
    assert steady.low < 0 < steady.high
    assert growing.low < 0.5 < growing.high
    assert growing.low > 0.4
    exact = slope([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert (exact.value, exact.low, exact.high) == pytest.approx((2.0, 2.0, 2.0))
    assert slope([1.0, 2.0], [1.0, 5.0]).high == math.inf


def test_a_ratio_of_equal_distributions_is_one() -> None:
    rng = Random(0)
    first, last = ([rng.expovariate(1.0) for _ in range(1000)] for _ in range(2))
    same = ratio_interval(first, last, 0.5)
    assert same.low < 1 < same.high
    assert ratio_interval(first, [2 * one for one in last], 0.5).low > 1.5


def test_a_pause_is_sound_that_comes_too_late() -> None:
    playback, second = omni.Playback(), bytes(2 * omni.RATE)
    for now in (0.0, 0.5, 3.0, 3.5):
        playback.play(second, now)
    assert playback.pauses == [1.0]
    assert (playback.seconds, playback.ends) == (4.0, 5.0)


def session(minutes: float, *, growth: float = 0.0, slower: float = 1.0) -> eyes.SessionFindings:
    found, rng = eyes.SessionFindings(), Random(0)
    for number in range(int(minutes * 120)):
        minute = number / 120
        found.minutes.append(minute)
        late = slower if minute > minutes / 2 else 1.0
        found.latencies.append(late * (0.1 + 0.01 * rng.random()))
        found.control.append(0.01)
        found.right.append(True)
        found.tokens.append(100)
        if number % 10 == 0:
            found.memory_minutes.append(minute)
            found.memory.setdefault("gateway", []).append(100 + growth * minute + rng.random())
    return found


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (session(12), [True, True]),
        (session(12, slower=1.5), [False, True]),
        (session(12, growth=1.0), [True, False]),
    ],
    ids=["flat", "slower", "growing"],
)
def test_targets_tell_a_flat_session_from_others(
    found: eyes.SessionFindings, met: list[bool]
) -> None:
    plan = eyes.Plan(minutes=12)
    findings = eyes.Findings(session=found)
    assert [target.met for target in eyes.targets(findings, plan)] == met
    assert "p99 per frame" in eyes.report(findings, plan)


def test_a_second_process_of_the_limiting_stage_has_to_pay_and_no_reply_may_be_lost() -> None:
    def run(scaled: str, sessions: int, seconds: float, lost: int = 0) -> omni.Run:
        return omni.Run(scaled, sessions, [omni.Spoken(0.1, 0.2, seconds, 8.0)] * sessions, lost)

    runs = [run("", 1, 4.0), run("", 4, 16.0), run("talker", 4, 16.0), run("code2wav", 4, 10.0, 1)]
    lost, gain = omni.targets(runs)
    assert (lost.value, lost.met) == (1, False)
    assert (gain.value, gain.met) == (1.6, True)
    assert len(omni.targets(runs[:3])) == 1
