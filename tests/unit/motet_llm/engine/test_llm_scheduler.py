"""The scheduler with a model that computes nothing: who runs, who waits, who gives way."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.cache.block_pool import BlockPool
from motet_llm.cache.block_tables import BlockTables
from motet_llm.engine.request import Request, Status
from motet_llm.scheduling.budget import SchedulerLimits
from motet_llm.scheduling.fairness import FairShares, TokenCounts, tenant_group
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_llm.scheduling.work import Work
from motet_models.capacity import KvGroup, KvLayout
from motet_shared.errors import Overloaded
from motet_shared.messages import BACKGROUND, Sampling

PLENTY = 1 << 30


def make_scheduler(
    num_blocks: int = 16, block_size: int = 4, pace: StepTimeEstimate | None = None, **limits: Any
) -> Scheduler:
    """With block tables of one group, and no prefix cache."""
    defaults = {"token_budget": 8, "max_running": 4, "max_waiting": 100}
    layout = KvLayout((KvGroup((0,)),), block_size, block_bytes=1)
    tables = BlockTables(BlockPool(num_blocks, block_size), layout, step_tokens=8)
    return Scheduler(tables, SchedulerLimits(**{**defaults, **limits}), pace=pace)


def make_request(
    arrival: int, prompt: int, output: int = 8, credit: int = PLENTY, said: int = 0, **options: Any
) -> Request:
    """said: tokens of the output that another worker has drawn."""
    tokens, replayed = list(range(prompt)), list(range(prompt, prompt + said))
    key, length = f"r{arrival}", prompt + output
    return Request(
        key,
        arrival,
        tokens,
        Sampling(),
        credit=credit,
        max_length=length,
        output=replayed,
        **options,
    )


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


def num_free(scheduler: Scheduler) -> int:
    return scheduler._tables.num_free


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
    assert (young.num_computed, young.tables, young.num_output) == (0, [], 1)
    while old.status is Status.RUNNING:
        run_step(scheduler)
    assert steps_of(run_step(scheduler)) == {"r1": 5}
    assert scheduler.preemptions == 1


def test_the_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_waiting=2)
    for arrival in range(2):
        scheduler.add(make_request(arrival, prompt=1))
    with pytest.raises(Overloaded):
        scheduler.add(make_request(2, prompt=1))


# --------------------------------------------------------------------------------------------------------------- credit
def test_a_request_without_credit_holds_its_blocks_and_is_passed_over() -> None:
    scheduler = make_scheduler()
    slow = make_request(0, prompt=4, credit=1)
    scheduler.add(slow)
    run_step(scheduler)
    assert slow.out_of_credit
    assert not scheduler.has_work
    assert run_step(scheduler) == []
    assert list(map(len, slow.tables)) == [1]
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


# ----------------------------------------------------------------------------------------------------------- priorities
def test_higher_priorities_go_first() -> None:
    scheduler = make_scheduler(max_running=1, token_budget=64)
    scheduler.add(make_request(0, prompt=4, output=1))
    scheduler.add(make_request(1, prompt=4, output=1))
    scheduler.add(make_request(2, prompt=4, output=1, priority=1))
    assert [steps_of(run_step(scheduler)) for _ in range(3)] == [{"r2": 4}, {"r0": 4}, {"r1": 4}]


def test_a_higher_priority_takes_the_place_of_a_lower_one_which_loses_nothing() -> None:
    scheduler = make_scheduler(max_running=1, token_budget=64)
    low = make_request(0, prompt=4)
    scheduler.add(low)
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(make_request(1, prompt=4, output=2, priority=1))
    assert steps_of(run_step(scheduler)) == {"r1": 4}
    assert (low.status, low.num_output) == (Status.WAITING, 2)
    assert steps_of(run_step(scheduler)) == {"r1": 1}
    assert steps_of(run_step(scheduler)) == {"r0": 6}


def test_nobody_gives_way_if_it_does_not_help() -> None:
    scheduler = make_scheduler(num_blocks=4, max_running=4, token_budget=64)
    scheduler.add(make_request(0, prompt=11, priority=2))
    scheduler.add(make_request(1, prompt=3))
    run_step(scheduler)
    scheduler.add(make_request(2, prompt=8, priority=1))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1}
    assert scheduler.preemptions == 0


# ------------------------------------------------------------------------------------------------------------ fairness
def test_tenants_share_by_tokens_not_by_requests() -> None:
    """One tenant sends long prompts, one short ones: they are served as many tokens, not as many requests."""
    scheduler = make_scheduler(num_blocks=400, max_running=2, token_budget=16, max_waiting=1000)
    for i in range(40):
        scheduler.add(make_request(i, prompt=40, output=1, tenant="long"))
    for i in range(40, 400):
        scheduler.add(make_request(i, prompt=4, output=1, tenant="short"))
    served = Counter[str]()
    for _ in range(60):
        for work in run_step(scheduler):
            served[work.request.tenant] += work.num_tokens
    assert served["long"] + served["short"] > 600
    assert 0.8 < served["long"] / served["short"] < 1.25


def test_a_flood_does_not_keep_another_tenant_out() -> None:
    scheduler = make_scheduler(max_running=4, token_budget=64)
    for i in range(20):
        scheduler.add(make_request(i, prompt=2, tenant="flood"))
    run_step(scheduler)
    scheduler.add(make_request(20, prompt=2, tenant="other"))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r20": 2}
    scheduler.add(make_request(21, prompt=2, tenant="other"))
    assert "r21" not in steps_of(run_step(scheduler)), "it runs something already"


def test_users_of_a_tenant_share_what_is_the_tenants() -> None:
    """Ten users of one tenant get together what the only one of another gets, and each as much as the others."""
    scheduler = make_scheduler(num_blocks=800, max_running=2, token_budget=16, max_waiting=2000)
    for i in range(400):
        scheduler.add(make_request(i, prompt=8, output=1, tenant=f"many\0user{i % 10}"))
    for i in range(400, 800):
        scheduler.add(make_request(i, prompt=8, output=1, tenant="one"))
    served, users = Counter[str](), Counter[str]()
    for _ in range(80):
        for work in run_step(scheduler):
            served[tenant_group(work.request.tenant)] += work.num_tokens
            users[work.request.tenant] += work.num_tokens
    assert served["many"] + served["one"] > 600
    assert 0.8 < served["many"] / served["one"] < 1.25
    del users["one"]
    assert len(users) == 10
    assert max(users.values()) - min(users.values()) <= 16


def test_a_flood_of_many_users_does_not_keep_another_tenant_out() -> None:
    scheduler = make_scheduler(max_running=4, token_budget=64)
    for i in range(20):
        scheduler.add(make_request(i, prompt=2, tenant=f"flood\0user{i}"))
    run_step(scheduler)
    scheduler.add(make_request(20, prompt=2, tenant="other"))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r20": 2}


def test_shares_of_users_are_forgotten_with_them() -> None:
    shares = FairShares()
    for tenant in ("acme\0ann", "acme\0bob", "acme", "solo"):
        shares.enter(tenant)
        shares.serve(tenant, 10)
    assert shares.served("acme\0ann") == (30, 10)
    assert shares.served("solo") == (40, 10), "it began where acme was"
    shares.enter("new\0eve")
    assert shares.served("new\0eve") == (30, 0), "a new tenant begins where the lowest is"
    for tenant in ("acme\0ann", "acme\0bob", "acme", "solo", "new\0eve"):
        shares.leave(tenant)
    assert len(shares) == 0
    assert not shares._users


def test_being_away_earns_no_claims() -> None:
    counts = TokenCounts()
    counts.enter("old")
    counts.serve("old", 1000)
    counts.enter("new")
    assert counts.served("new") == 1000
    counts.serve("new", 500)
    counts.leave("new")
    counts.enter("new")
    assert counts.served("new") == 1500, "leaving does not forgive either"
    counts.leave("new")
    counts.serve("old", 600)
    counts.leave("old")
    assert len(counts) == 0


# ---------------------------------------------------------------------------------------------------------------- pace
def make_pace() -> StepTimeEstimate:
    """A step of 30 ms, and half a millisecond for every token that is prefilled in it."""
    pace = StepTimeEstimate()
    for _ in range(10):
        pace.note(0.030, num_decodes=1, num_prefill_tokens=0)
        pace.note(0.030, num_decodes=2, num_prefill_tokens=0)
        pace.note(0.030 + 0.0005 * 100, num_decodes=1, num_prefill_tokens=100)
    return pace


@pytest.mark.parametrize(("goal", "chunk"), [(0.0, 60), (0.05, 60), (0.13, 200), (None, 140)])
def test_prefilling_stretches_steps_of_running_streams_only_so_far(
    goal: float | None, chunk: int
) -> None:
    limits: dict[str, Any] = {"token_budget": 512, "decode_slowdown": 2.0, "latency_goal": goal}
    scheduler = make_scheduler(num_blocks=200, pace=make_pace(), **limits)
    scheduler.add(make_request(0, prompt=4))
    run_step(scheduler)
    scheduler.add(make_request(1, prompt=400))
    assert steps_of(run_step(scheduler)) == {
        "r0": 1,
        "r1": chunk,
    }  # 30 ms and more at half a millisecond a token
    scheduler.finish(scheduler.running[0])
    assert steps_of(run_step(scheduler)) == {"r1": 400 - chunk}, (
        "nobody decodes: nobody is disturbed"
    )


@pytest.mark.parametrize(("streams", "chunk"), [(1, 140), (2, 40), (3, 60), (8, 60)])
def test_without_a_latency_goal_streams_share_one(streams: int, chunk: int) -> None:
    """Two streams may wait for 50 ms, 20 more than a step takes; more, for twice a step's time."""
    pace = make_pace()
    for _ in range(10):
        pace.note(0.030, num_decodes=streams, num_prefill_tokens=0)
    slowdown = 1.2 if streams == 2 else 2.0
    limits: dict[str, Any] = {"decode_slowdown": slowdown, "latency_goal": None}
    scheduler = make_scheduler(
        num_blocks=400, pace=pace, token_budget=512, max_running=16, **limits
    )
    for arrival in range(streams):
        scheduler.add(make_request(arrival, prompt=4))
    run_step(scheduler)
    scheduler.add(make_request(streams, prompt=400))
    assert steps_of(run_step(scheduler))[f"r{streams}"] == chunk


def test_a_stream_that_was_interrupted_may_slow_others_down_more_and_goes_first() -> None:
    scheduler = make_scheduler(
        num_blocks=900, pace=make_pace(), token_budget=1024, decode_slowdown=2.0
    )
    scheduler.add(make_request(0, prompt=4))
    run_step(scheduler)
    scheduler.add(make_request(1, prompt=600))
    scheduler.add(make_request(2, prompt=300, output=600, said=500))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r2": 540}  # 300 ms, ten times a step
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r2": 260}
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r2": 1, "r1": 60}
    scheduler.add(make_request(3, prompt=300, output=600, said=500))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r2": 1, "r1": 60, "r3": 480}, (
        "and does not wait for its turn"
    )


def crowded(**options: Any) -> Scheduler:
    """Three streams of tenant a decode, and a prompt of theirs takes all that is left for prefilling."""
    limits: dict[str, Any] = {"token_budget": 1024, "decode_slowdown": 2.0, "max_running": 8}
    scheduler = make_scheduler(num_blocks=1000, pace=make_pace(), **limits)
    for arrival in range(3):
        scheduler.add(make_request(arrival, prompt=4, output=100, tenant="a", **options))
    run_step(scheduler)
    scheduler.add(make_request(3, prompt=600, tenant="a"))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r3": 60}
    return scheduler


def test_who_is_crowded_out_by_another_tenant_waits_neither_for_its_prompts_nor_for_its_streams() -> (
    None
):
    scheduler = crowded()
    scheduler.add(make_request(4, prompt=700, tenant="b"))
    scheduler.add(make_request(5, prompt=700, tenant="b"))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r4": 540}, (
        "300 ms, ten times a step"
    )
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r3": 60}, (
        "b has had more than a by now"
    )


def test_a_crowd_that_takes_long_rests_in_every_second_step_at_most() -> None:
    scheduler = crowded()
    for _ in range(10):
        scheduler.pace.note(
            0.060, num_decodes=3, num_prefill_tokens=0
        )  # one of them takes half as long
    for arrival in range(4, 10):
        scheduler.add(make_request(arrival, prompt=30, output=1, tenant=f"t{arrival}"))
        works = steps_of(run_step(scheduler))
        assert works[f"r{arrival}"] == 30
        assert works.keys().isdisjoint({"r0", "r1", "r2"}) == (arrival % 2 == 0)


@pytest.mark.parametrize(
    ("streams", "request_"),
    [
        ({}, {"tenant": "a"}),
        ({}, {"tenant": "b", "priority": -1}),
        ({"priority": 1}, {"tenant": "b"}),
    ],
    ids=["one of theirs", "of low priority", "of lower priority than theirs"],
)
def test_who_is_not_crowded_out_waits_for_those_who_prefill(
    streams: dict[str, Any], request_: dict[str, Any]
) -> None:
    scheduler = crowded(**streams)
    scheduler.add(make_request(4, prompt=300, **request_))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r3": 60}


def test_a_tenant_with_a_single_stream_crowds_nobody_out() -> None:
    scheduler = make_scheduler(
        num_blocks=900, pace=make_pace(), token_budget=1024, decode_slowdown=2.0, max_running=8
    )
    for arrival, tenant in enumerate("abc"):
        scheduler.add(make_request(arrival, prompt=4, output=100, tenant=tenant))
    run_step(scheduler)
    scheduler.add(make_request(3, prompt=600, tenant="d"))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r3": 60}


def test_chunks_of_prompts_are_not_smaller_than_pays() -> None:
    pace = StepTimeEstimate()
    for _ in range(10):
        pace.note(0.004, num_decodes=1, num_prefill_tokens=0)
        pace.note(0.008, num_decodes=1, num_prefill_tokens=8)  # the same for 8, 16 and 32 tokens
    scheduler = make_scheduler(num_blocks=100, pace=pace, token_budget=512, decode_slowdown=1.8)
    scheduler.add(make_request(0, prompt=4))
    run_step(scheduler)
    pace.note(0.004, num_decodes=1, num_prefill_tokens=0)
    scheduler.add(make_request(1, prompt=200))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 32}


def test_what_streams_take_is_not_laid_to_what_is_prefilled_beside_them() -> None:
    """One stream, then many more while somebody prefills in every step: chunks must not shrink with their number."""
    pace = make_pace()
    chunk, looks = 0.0, 0
    for _ in range(1000):
        rows = 32
        if pace.needs_decode_sample(rows):
            looks += 1
            pace.note(0.100, rows, num_prefill_tokens=0)
            continue
        chunk = max(8.0, pace.chunk(rows, 2.0))
        pace.note(0.100 + 0.002 * chunk, rows, num_prefill_tokens=int(chunk))
    assert chunk == pytest.approx(50, abs=1), "100 ms at 2 ms a token"
    assert pace.prefill_token == pytest.approx(0.002, rel=0.05)
    assert looks == 1000 // 33 + 1


def test_what_is_not_known_yet_limits_nothing() -> None:
    assert StepTimeEstimate().chunk(1, 2.0) == math.inf
    assert StepTimeEstimate().at_least(1000, 1000) == 0


# ----------------------------------------------------------------------------------------------------------- ablations
def test_static_batching_waits_for_the_whole_batch() -> None:
    scheduler = make_scheduler(num_blocks=100, token_budget=64, static_batching=True)
    scheduler.add(make_request(0, prompt=4, output=3))
    scheduler.add(make_request(1, prompt=4, output=2))
    assert steps_of(run_step(scheduler)) == {"r0": 4, "r1": 4}
    scheduler.add(make_request(2, prompt=4))
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1}
    assert steps_of(run_step(scheduler)) == {"r0": 1}
    assert steps_of(run_step(scheduler)) == {"r2": 4}


def test_contiguous_kv_holds_room_for_the_whole_answer() -> None:
    scheduler = make_scheduler(num_blocks=8, token_budget=64, contiguous_kv=True)
    scheduler.add(make_request(0, prompt=4, output=16))
    scheduler.add(make_request(1, prompt=4, output=16))
    assert steps_of(run_step(scheduler)) == {"r0": 4}
    assert num_free(scheduler) == 3


# ------------------------------------------------------------------------------------------------------------- property
requests: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    prompt=st.integers(1, 20),
    output=st.integers(1, 12),
    credit=st.sampled_from([0, 1, 3, PLENTY]),
    priority=st.sampled_from([0, 0, 1, BACKGROUND]),
    tenant=st.sampled_from(["a", "b"]),
    at=st.integers(0, 15),
    cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 30)),
)


@settings(max_examples=150)
@given(
    plan=st.lists(requests, min_size=1, max_size=10),
    num_blocks=st.integers(8, 24),
    max_running=st.integers(1, 5),
    spare=st.integers(0, 20),
)
def test_everything_is_served_within_all_limits(
    plan: list[dict[str, Any]], num_blocks: int, max_running: int, spare: int
) -> None:
    scheduler = make_scheduler(
        num_blocks, token_budget=max_running + spare, max_running=max_running
    )
    plan.sort(key=lambda wish: wish["at"])
    fields = ("prompt", "output", "credit", "priority", "tenant")
    requests = [
        make_request(i, **{name: wish[name] for name in fields}) for i, wish in enumerate(plan)
    ]
    lengths = [0] * len(requests)
    for step in range(2000):
        for request, wish in zip(requests, plan, strict=True):
            if wish["at"] == step:
                scheduler.add(request)
            if (
                wish["at"] <= step
                and wish["cancel_at"] == step
                and request.status is not Status.FINISHED
            ):
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
    assert num_free(scheduler) == num_blocks
    for request, wish in zip(requests, plan, strict=True):
        assert request.tokens == list(range(len(request.tokens)))
        assert wish["cancel_at"] is not None or request.num_output == wish["output"]


def _check_step(scheduler: Scheduler) -> None:
    had_work = scheduler.has_work
    works = run_step(scheduler)
    scheduler.check_integrity()
    assert bool(works) == had_work
    assert sum(work.num_tokens for work in works) <= scheduler.limits.token_budget
    assert len({id(work.request) for work in works}) == len(works) <= scheduler.limits.max_running
    assert not any(work.request.emitted > work.request.credit for work in works)
    sizes = [work.num_tokens for work in works]
    assert sizes == sorted(sizes, key=lambda size: size > 1)
