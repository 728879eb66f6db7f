"""Background requests in the scheduler: they rest beside others, give way first, and do not starve."""

from __future__ import annotations

import pytest

from motet_llm.engine.request import Status
from motet_llm.scheduling.background import SHARED_EVERY
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_shared.messages import BACKGROUND
from unit.motet_llm.engine.test_llm_scheduler import (
    make_request,
    make_scheduler,
    run_step,
    steps_of,
)


def pace_of(first: float, row: float) -> StepTimeEstimate:
    """Return the estimate of an engine whose step of n rows takes `first` + n * `row` seconds."""
    pace = StepTimeEstimate()
    for rows in (1, 4, 8):
        for _ in range(10):
            pace.note(first + rows * row, num_decodes=rows, num_prefill_tokens=0)
    return pace


def test_background_requests_rest_while_another_runs() -> None:
    scheduler = make_scheduler(num_blocks=64, token_budget=64)
    for number in range(3):
        scheduler.add(make_request(number, prompt=4, priority=BACKGROUND))
    assert steps_of(run_step(scheduler)) == {"r0": 4, "r1": 4, "r2": 4}
    scheduler.add(make_request(3, prompt=4, output=3))
    scheduler.add(make_request(4, prompt=4, priority=BACKGROUND))
    assert steps_of(run_step(scheduler)) == {"r3": 4}
    assert steps_of(run_step(scheduler)) == {"r3": 1}
    assert steps_of(run_step(scheduler)) == {"r3": 1}
    assert steps_of(run_step(scheduler)) == {"r0": 1, "r1": 1, "r2": 1, "r4": 4}


def test_they_give_up_their_places_to_all_others() -> None:
    scheduler = make_scheduler(num_blocks=64, token_budget=64, max_running=2)
    low = [make_request(number, prompt=4, priority=BACKGROUND) for number in range(2)]
    for request in low:
        scheduler.add(request)
    run_step(scheduler)
    scheduler.add(make_request(2, prompt=4, output=2, priority=-1))
    run_step(scheduler)
    assert [request.status for request in low] == [Status.RUNNING, Status.WAITING]
    assert low[1].num_output == 1, "nothing is lost"


def test_they_advance_however_busy_the_engine_is() -> None:
    scheduler = make_scheduler(num_blocks=400, token_budget=64)
    batch = make_request(0, prompt=4, output=3, priority=BACKGROUND)
    scheduler.add(batch)
    scheduler.add(make_request(1, prompt=4, output=900))
    joined = [step for step in range(3 * SHARED_EVERY) if "r0" in steps_of(run_step(scheduler))]
    assert joined == [SHARED_EVERY - 1, 2 * SHARED_EVERY - 1, 3 * SHARED_EVERY - 1]
    assert batch.status is Status.FINISHED


@pytest.mark.parametrize(
    ("first", "row", "joining"),
    [(0.020, 0.0003, 2), (0.002, 0.001, 0), (0.020, 0.0, 0), (0.020, -0.0001, 0)],
)
def test_rows_that_cost_next_to_nothing_join(first: float, row: float, joining: int) -> None:
    """As on a GPU, where reading the weights takes most of a step; an unknown cost is none of those."""
    scheduler = make_scheduler(
        num_blocks=64, token_budget=64, max_running=8, pace=pace_of(first, row)
    )
    for number in range(4):
        scheduler.add(make_request(number, prompt=4, priority=BACKGROUND))
    run_step(scheduler)
    scheduler.add(make_request(4, prompt=4))
    assert steps_of(run_step(scheduler)) == {"r4": 4}
    assert len(run_step(scheduler)) == 1 + joining


def test_they_go_on_where_what_waits_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=4, token_budget=64)
    scheduler.add(make_request(0, prompt=7, output=2, priority=BACKGROUND))
    scheduler.add(make_request(1, prompt=7, output=2, credit=0))
    run_step(scheduler)
    while scheduler.has_work:
        assert run_step(scheduler)
