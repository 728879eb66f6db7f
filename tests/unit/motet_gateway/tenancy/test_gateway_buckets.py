"""Limits over time, against exact fractions: nothing is lost to rounding, and no wait is too short or too long."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_gateway.tenancy.buckets import NANOSECONDS, Allowance, Bucket
from motet_gateway.tenancy.deferral import Deferral
from support.stages.tenants_stage import Now

amounts = st.integers(0, 5000)
pauses = st.integers(0, 200 * NANOSECONDS)


class Counted:
    def __init__(self) -> None:
        self.total = 0.0

    def inc(self, amount: float = 1) -> None:
        assert amount >= 0, "a counter only grows"
        self.total += amount


def allowance(limit: int | None, clock: Now, period: int = 60) -> tuple[Allowance, Counted]:
    counted = Counted()
    made = Allowance("tokens", counted)
    made.bound(limit, period, clock)
    return made, counted


@given(
    st.integers(1, 10_000),
    st.sampled_from([60, 3600]),
    st.lists(st.tuples(pauses, st.integers(-300, 5000))),
)
def test_the_level_is_that_of_exact_arithmetic(
    limit: int, period: int, uses: list[tuple[int, int]]
) -> None:
    clock = Now()
    bucket, level = Bucket(limit, period, clock), Fraction(limit)
    for pause, amount in uses:
        clock.ns += pause
        level = min(level + Fraction(limit * pause, period * NANOSECONDS), Fraction(limit))
        bucket.charge(amount)
        level = min(level - amount, Fraction(limit))
        assert bucket.level == level.__floor__()


@given(st.integers(1, 10_000), st.sampled_from([60, 3600]), amounts, amounts)
def test_what_was_waited_for_is_there_and_not_a_nanosecond_earlier(
    limit: int, period: int, used: int, amount: int
) -> None:
    clock = Now()
    bucket = Bucket(limit, period, clock)
    bucket.charge(used)
    wait = bucket.wait(amount)
    if wait:
        clock.ns += wait - 1
        assert bucket.wait(amount) == 1
        clock.ns += 1
    assert bucket.wait(amount) == 0
    assert bucket.level >= min(amount, limit)


@given(st.integers(1, 100), st.lists(st.integers(1, 20), min_size=1, max_size=60), pauses)
def test_no_window_takes_more_than_a_full_bucket_and_what_came_meanwhile(
    limit: int, asked: list[int], pause: int
) -> None:
    """Whatever is asked for, and however often: admitted are at most `limit`, and what time gives."""
    clock = Now()
    bucket, taken = Bucket(limit, 60, clock), 0
    for amount in asked:
        if amount <= limit and not bucket.wait(amount):
            bucket.charge(amount)
            taken += amount
        clock.ns += pause // len(asked)
    assert taken <= limit + Fraction(limit * clock.ns, 60 * NANOSECONDS)


def test_more_than_the_limit_needs_a_full_bucket_and_leaves_a_debt() -> None:
    clock = Now()
    bucket = Bucket(60, 60, clock)
    assert bucket.wait(1000) == 0
    bucket.charge(100)
    assert bucket.level == -40
    assert bucket.wait(1) == 41 * NANOSECONDS
    assert bucket.full_in == 100 * NANOSECONDS


def test_nothing_is_never_there() -> None:
    bucket = Bucket(0, 3600, clock := Now())
    assert bucket.wait(0) == 0
    clock.wait(10_000)
    assert bucket.wait(1) == 3600 * NANOSECONDS


@pytest.mark.parametrize(("other", "level"), [(100, 70), (40, 10), (20, -10)])
def test_another_limit_keeps_what_was_used(other: int, level: int) -> None:
    bucket = Bucket(60, 60, Now())
    bucket.charge(30)
    bucket.resize(other)
    assert (bucket.limit, bucket.level) == (other, level)


@given(st.integers(1, 200), st.integers(0, 300), st.lists(st.integers(0, 50), max_size=20))
def test_a_hold_charges_in_the_end_what_was_used(limit: int, held: int, uses: list[int]) -> None:
    """As long as no time passes: the level falls by what was used, whatever was held."""
    made, counted = allowance(limit, Now())
    assert made.bucket is not None
    hold = made.hold(held)
    assert made.bucket.level == limit - min(held, limit)
    for amount in uses:
        hold.use(amount)
        assert made.bucket.level <= limit - hold.used, (
            "what exceeds the hold is charged as it comes"
        )
    hold.settle()
    hold.settle()
    assert made.bucket.level == limit - sum(uses)
    assert counted.total == sum(uses)


def test_a_correction_comes_back_at_the_end() -> None:
    made, counted = allowance(100, Now())
    assert made.bucket is not None
    hold = made.hold(10)
    hold.use(50)
    hold.use(-45)
    assert made.bucket.level == 50
    hold.settle()
    assert (made.bucket.level, counted.total) == (95, 5)


@pytest.mark.parametrize(("end", "left", "total"), [("settle", 70, 30), ("cancel", 100, 0)])
def test_a_deferred_charge_holds_what_was_used(end: str, left: int, total: int) -> None:
    made, counted = allowance(100, Now())
    assert made.bucket is not None
    deferral, hold = Deferral(), made.hold(80)
    deferral.add([hold])
    hold.use(30)
    deferral.trim()
    assert (made.bucket.level, counted.total) == (70, 0)
    getattr(deferral, end)()
    assert (made.bucket.level, counted.total) == (left, total)


def test_without_a_limit_it_is_only_counted() -> None:
    made, counted = allowance(None, Now())
    assert made.wait(10**9) == 0
    hold = made.hold(10)
    hold.use(25)
    hold.settle()
    assert counted.total == 25
