"""The thread that every engine has, with an engine that only counts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial
from queue import Queue

import pytest

from motet_shared.errors import BadRequest, InternalError, MotetError
from motet_shared.process.engine_thread import EngineThread, Pending

LONG = 20.0  # seconds: no test waits so long unless it fails
Output = tuple[str, int | str]


class Countdown:
    """Each step counts every request down by one; a request for less than one is refused."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.steps = 0
        self.threads: set[str] = set()
        self.open = threading.Event()  # while it is not set, a step hangs
        self.open.set()
        self.stepping = threading.Event()

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, key: str, count: int) -> None:
        self.threads.add(threading.current_thread().name)
        if key in self.left:
            raise RuntimeError("twice")
        if count < 1:
            raise BadRequest(f"count: {count}; give at least 1", param="count")
        self.left[key] = count

    def cancel(self, key: str) -> None:
        self.left.pop(key, None)

    def step(self) -> list[Output]:
        self.stepping.set()
        self.open.wait()
        self.steps += 1
        self.threads.add(threading.current_thread().name)
        outputs: list[Output] = [(key, count - 1) for key, count in self.left.items()]
        self.left = {key: count - 1 for key, count in self.left.items() if count > 1}
        return outputs

    def stats(self) -> dict[str, float]:
        return {"running": len(self.left)}


class CountdownThread(EngineThread[Countdown, Output]):
    name = "countdown"
    patience: float | None = None

    def submit(self, key: str, count: int) -> None:
        self._submit(key, partial(self.engine.add, key, count))

    def _refusal(self, key: str, error: MotetError) -> Output:
        return key, error.message

    def _step(self) -> list[Output]:
        return self.engine.step()

    def _patience(self) -> float | None:
        return self.patience


class Stage:
    """A thread, and what it told."""

    def __init__(self) -> None:
        self.engine = Countdown()
        self.batches: Queue[list[Output]] = Queue()
        self.crashes: Queue[BaseException] = Queue()
        self.thread = CountdownThread(self.engine, self.batches.put, self.crashes.put)

    def hold(self) -> None:
        """Returns within a step, which goes on when `engine.open` is set."""
        self.engine.open.clear()
        self.engine.stepping.clear()
        self.thread.submit("held", 1_000_000)
        assert self.engine.stepping.wait(LONG)

    def idle(self) -> None:
        """Returns once all commands so far have been followed."""
        followed = threading.Event()
        self.thread.between_steps(followed.set)
        assert followed.wait(LONG)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    stage.thread.start()
    yield stage
    stage.engine.open.set()
    stage.thread.stop()
    assert not any(thread.name == "countdown" for thread in threading.enumerate())


def test_each_step_is_told_in_one_call_and_all_is_done_on_the_thread(stage: Stage) -> None:
    stage.hold()
    stage.thread.cancel("held")
    stage.thread.submit("a", 2)
    stage.thread.submit("b", 1)
    stage.engine.open.set()
    assert stage.batches.get(timeout=LONG) == [("held", 999_999)]
    assert stage.batches.get(timeout=LONG) == [("a", 1), ("b", 0)]
    assert stage.batches.get(timeout=LONG) == [("a", 0)]
    assert stage.engine.threads == {"countdown"}


def test_commands_take_effect_between_steps_in_order(stage: Stage) -> None:
    stage.hold()
    stage.thread.submit("a", 5)
    stage.thread.cancel("a")
    stage.thread.submit("a", 1)
    stage.thread.cancel("held")
    assert stage.thread.stats() == {"running": 1, "commands": 4}
    assert "a" not in stage.engine.left
    stage.engine.open.set()
    assert stage.batches.get(timeout=LONG) == [("held", 999_999)]
    assert stage.batches.get(timeout=LONG) == [("a", 0)]


def test_it_sleeps_without_work(stage: Stage) -> None:
    stage.thread.submit("a", 3)
    for _ in range(3):
        stage.batches.get(timeout=LONG)
    stage.idle()
    steps = stage.engine.steps
    assert not stage.crashes.qsize()
    stage.engine.stepping.clear()
    assert not stage.engine.stepping.wait(0.2), "a step without work"
    assert stage.engine.steps <= steps + 1


def test_its_patience_wakes_it(stage: Stage) -> None:
    stage.thread.patience = 0.01
    stage.idle()
    stage.engine.stepping.clear()
    assert stage.engine.stepping.wait(LONG)
    assert stage.batches.empty(), "a step with nothing to say is not told"


def test_a_refusal_is_an_output_and_others_go_on(stage: Stage) -> None:
    stage.thread.submit("bad", 0)
    assert stage.batches.get(timeout=LONG) == [("bad", "count: 0; give at least 1")]
    stage.hold()
    stage.thread.submit("bad", -1)
    stage.thread.submit("good", 1)
    stage.thread.cancel("held")
    stage.engine.open.set()
    stage.batches.get(timeout=LONG)
    assert stage.batches.get(timeout=LONG) == [("bad", "count: -1; give at least 1"), ("good", 0)]


def test_a_step_that_hangs_is_seen_from_outside(stage: Stage) -> None:
    assert stage.thread.step_seconds == 0.0
    stage.hold()
    before = stage.thread.step_seconds
    assert stage.thread.step_seconds > before >= 0.0
    stage.thread.cancel("held")
    stage.engine.open.set()
    stage.batches.get(timeout=LONG)
    end = time.monotonic() + LONG
    while stage.thread.step_seconds:
        assert time.monotonic() < end, "it sleeps, and nothing is stuck"


def test_a_watch_crashes_what_hangs_for_too_long(stage: Stage) -> None:
    patient, strict = stage.thread.watch(1000.0), stage.thread.watch(0.0)
    asyncio.run(strict(0.1))
    stage.hold()
    asyncio.run(patient(0.1))
    assert stage.crashes.empty()
    asyncio.run(strict(0.1))
    error = stage.crashes.get(timeout=LONG)
    assert isinstance(error, InternalError)
    assert "step_timeout" in error.message


def test_what_breaks_the_engine_is_told_once_and_ends_the_thread(stage: Stage) -> None:
    stage.thread.submit("a", 1_000_000)
    stage.thread.submit("a", 1)
    assert str(stage.crashes.get(timeout=LONG)) == "twice"
    stage.thread.stop()
    assert stage.crashes.empty()
    while not stage.batches.empty():
        assert stage.batches.get()[0][0] == "a"


def test_it_can_be_stopped_in_the_middle_of_work_and_twice(stage: Stage) -> None:
    stage.thread.submit("a", 1_000_000)
    stage.batches.get(timeout=LONG)
    stage.thread.stop()
    steps = stage.engine.steps
    stage.thread.stop()
    assert stage.engine.steps == steps < 1_000_000
    assert stage.crashes.empty()


def test_one_that_never_ran_can_be_stopped() -> None:
    Stage().thread.stop()


async def test_results_come_back_to_those_who_wait() -> None:
    pending: Pending[str] = Pending()
    submitted: list[int] = []
    cancelled: list[int] = []
    asking = [
        asyncio.create_task(pending.result(submitted.append, cancelled.append)) for _ in range(4)
    ]
    await asyncio.sleep(0)
    asking[1].cancel()
    await asyncio.sleep(0)
    results: list[str | MotetError] = ["one", "late", BadRequest("no")]
    for key, result in zip(submitted, results, strict=False):
        pending.settle(key, result)
    pending.fail(RuntimeError("gone"))
    assert await asking[0] == "one"
    assert cancelled == [submitted[1]]
    with pytest.raises(BadRequest):
        await asking[2]
    with pytest.raises(InternalError):
        await asking[3]
    with pytest.raises(asyncio.CancelledError):
        await asking[1]
