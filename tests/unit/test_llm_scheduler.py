"""The scheduler with a model that computes nothing: who runs, who waits, who gives way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.block_pool import BlockPool
from motet_llm.request import Request, Status
from motet_llm.scheduler import Scheduler, Work
from motet_shared.errors import Overloaded
from motet_shared.messages import Sampling

PLENTY = 1 << 30


def make_scheduler(
    num_blocks: int = 16, block_size: int = 4, token_budget: int = 8, max_running: int = 4, max_waiting: int = 100
) -> Scheduler:
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, token_budget=token_budget, max_running=max_running, max_waiting=max_waiting)


def make_request(arrival: int, prompt: int, output: int = 8, credit: int = PLENTY) -> Request:
    sampling = Sampling(max_tokens=output)
    return Request(f"r{arrival}", arrival, list(range(prompt)), sampling, credit=credit, max_length=prompt + output)


def run_step(scheduler: Scheduler) -> list[Work]:
    """What the engine does with a schedule, without the model: token = its position."""
    works = scheduler.schedule()
    for work in works:
        request = work.request
        draws = work.draws
        request.num_computed += work.num_tokens
        if draws:
            request.tokens.append(len(request.tokens))
            request.emitted += 1
            if request.is_full:
                scheduler.finish(request)
    return works


def steps_of(works: list[Work]) -> dict[str, int]:
    return {str(work.request.key): work.num_tokens for work in works}


# ------------------------------------------------------------------------------------------------------- the plain case
def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    scheduler = make_scheduler(token_budget=8)
    scheduler.add(make_request(0, prompt=2))
    assert steps_of(run_step(scheduler)) == {"r0": 2}
    scheduler.add(make_request(1, prompt=16))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 7}
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 7}
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 2}
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1}


def test_no_arrival_overtakes_one_that_does_not_fit_yet() -> None:
    scheduler = make_scheduler(num_blocks=4, token_budget=64)
    scheduler.add(make_request(0, prompt=8, output=4))
    run_step(scheduler)
    scheduler.add(make_request(1, prompt=12))
    scheduler.add(make_request(2, prompt=1))
    while scheduler.running:
        assert steps_of(run_step(scheduler)) == {"r0": 1}
    assert steps_of(run_step(scheduler)) == {"r1": 12, "r2": 1}


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4, token_budget=64)
    old, young = make_request(0, prompt=4), make_request(1, prompt=4)
    scheduler.add(old)
    scheduler.add(young)
    run_step(scheduler)
    run_step(scheduler)
    assert young.status is Status.WAITING
    assert (young.num_computed, young.block_table, young.num_output) == (0, [], 1)
    while old.status is Status.RUNNING:
        run_step(scheduler)
    assert steps_of(run_step(scheduler)) == {"r1": 5}
    assert scheduler.preemptions == 1


def test_the_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_waiting=2)
    for arrival in range(2):
        scheduler.add(make_request(arrival, prompt=1))
    with pytest.raises(Overloaded, match="max_waiting=2"):
        scheduler.add(make_request(2, prompt=1))


# --------------------------------------------------------------------------------------------------------------- credit
def test_a_request_without_credit_holds_its_blocks_and_is_passed_over() -> None:
    scheduler = make_scheduler()
    slow = make_request(0, prompt=4, credit=1)
    scheduler.add(slow)
    run_step(scheduler)
    assert slow.paused
    assert not scheduler.has_work
    assert run_step(scheduler) == []
    assert slow.block_table
    slow.credit = 2
    assert steps_of(run_step(scheduler)) == {"r0": 1}


def test_paused_requests_give_way_first_even_to_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, token_budget=64)
    slow, fast = make_request(0, prompt=8, credit=1), make_request(1, prompt=4)
    scheduler.add(slow)
    scheduler.add(fast)
    run_step(scheduler)
    scheduler.add(make_request(2, prompt=8))
    assert steps_of(run_step(scheduler)) == {"r1": 1, "r2": 8}
    assert slow.status is Status.WAITING
    assert fast.status is Status.RUNNING


def test_paused_requests_take_no_place_from_others() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(make_request(0, prompt=4, credit=1))
    run_step(scheduler)
    scheduler.add(make_request(1, prompt=4))
    assert steps_of(run_step(scheduler)) == {"r1": 4}


# ------------------------------------------------------------------------------------------------------------- property
requests: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    prompt=st.integers(1, 20),
    output=st.integers(1, 12),
    credit=st.sampled_from([0, 1, 3, PLENTY]),
    at=st.integers(0, 15),
    cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 30)),
)


@settings(max_examples=150, deadline=None)
@given(
    plan=st.lists(requests, min_size=1, max_size=10),
    num_blocks=st.integers(8, 24),
    max_running=st.integers(1, 5),
    spare=st.integers(0, 20),
)
def test_everything_is_served_within_all_limits(
    plan: list[dict[str, int]], num_blocks: int, max_running: int, spare: int
) -> None:
    scheduler = make_scheduler(num_blocks, token_budget=max_running + spare, max_running=max_running)
    plan.sort(key=lambda wish: wish["at"])
    requests = [make_request(i, wish["prompt"], wish["output"], wish["credit"]) for i, wish in enumerate(plan)]
    lengths = [0] * len(requests)
    for step in range(2000):
        for request, wish in zip(requests, plan, strict=True):
            if wish["at"] == step:
                scheduler.add(request)
            if wish["at"] <= step and wish["cancel_at"] == step and request.status is not Status.FINISHED:
                scheduler.finish(request)
            if step % 7 == 6:
                request.credit += 1
        _check_step(scheduler)
        for i, request in enumerate(requests):
            assert len(request.tokens) >= lengths[i], "a preemption lost tokens"
            lengths[i] = len(request.tokens)
        if step > 15 and all(r.status is Status.FINISHED for r in requests):
            break
    assert all(r.status is Status.FINISHED for r in requests), "somebody starves"
    assert scheduler.pool.num_free == num_blocks
    for request, wish in zip(requests, plan, strict=True):
        assert request.tokens == list(range(len(request.tokens)))
        assert wish["cancel_at"] is not None or request.num_output == wish["output"]


def _check_step(scheduler: Scheduler) -> None:
    hopeful = [r for r in scheduler.waiting if not r.paused]
    had_work = scheduler.has_work
    works = run_step(scheduler)
    scheduler.check_integrity()
    assert bool(works) == had_work
    assert sum(work.num_tokens for work in works) <= scheduler.token_budget
    assert len({id(work.request) for work in works}) == len(works) <= scheduler.max_running
    assert not any(work.request.emitted > work.request.credit for work in works)
    sizes = [work.num_tokens for work in works]
    assert sizes == sorted(sizes, key=lambda size: size > 1)
    admitted = [r for r in hopeful if r.status is not Status.WAITING]
    assert admitted == hopeful[: len(admitted)], "somebody was overtaken"
