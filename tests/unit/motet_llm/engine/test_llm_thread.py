"""The engine's thread: one callback per step, sleep when idle, commands at step boundaries, an honest end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import Emit, StepOutput
from motet_llm.engine.thread import EngineThread
from motet_shared.errors import BadRequest, DeadlineExceeded, InternalError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = [10, 20, 30]


class Harness:
    """A thread whose callbacks land in queues, and a count of the engine's steps."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.batches: Queue[list[StepOutput]] = Queue()
        self.crashes: Queue[BaseException] = Queue()
        self.steps = 0
        self._step = engine.step
        engine.step = self._counted  # type: ignore[method-assign]
        self.thread = EngineThread(engine, self.batches.put, self.crashes.put)
        self.thread.start()

    def _counted(self, emit: Emit | None = None) -> list[StepOutput]:
        self.steps += 1
        return self._step(emit)

    def collect(self, *keys: str) -> dict[str, list[StepOutput]]:
        """Outputs until all of `keys` have ended."""
        outputs: dict[str, list[StepOutput]] = {key: [] for key in keys}
        while not all(o and (o[-1].finish or o[-1].error) for o in outputs.values()):
            for output in self.batches.get(timeout=20):
                outputs[str(output.key)].append(output)
        return outputs

    def wait_idle(self) -> int:
        """Steps made once the thread has nothing left to do."""
        before = -1
        while before != self.steps or self.engine.has_work or self.thread.stats()["commands"]:
            before = self.steps
            time.sleep(0.05)
        return before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def harness(folder: Path) -> Iterator[Harness]:
    harness = Harness(Engine(EngineConfig(model=str(folder), threads=1, num_blocks=64)))
    yield harness
    harness.thread.stop()
    assert not any(t.name == "motet-engine" for t in threading.enumerate())


def test_all_outputs_of_a_step_come_in_one_call(harness: Harness) -> None:
    harness.engine.step, hold = _gate(harness.engine.step)  # type: ignore[method-assign]
    for key in "abc":
        harness.thread.submit(key, PROMPT, Sampling(max_tokens=4, **GREEDY))
    hold.set()
    batches: list[list[StepOutput]] = []
    while sum(bool(o.finish) for batch in batches for o in batch) < 3:
        batches.append(harness.batches.get(timeout=20))
    assert max(len(batch) for batch in batches) == 3
    assert all(len({o.key for o in batch}) == len(batch) for batch in batches)
    assert len(batches) <= 4 + 2


def _gate(step: Any) -> tuple[Any, threading.Event]:
    opened = threading.Event()

    def gated(emit: Emit) -> Any:
        opened.wait()
        return step(emit)

    return gated, opened


def test_it_sleeps_when_idle_and_when_all_wait_for_credit(harness: Harness) -> None:
    harness.thread.submit("a", PROMPT, Sampling(max_tokens=4, **GREEDY), credit=2)
    assert sum(len(harness.batches.get(timeout=20)) for _ in range(2)) == 2
    idle = harness.wait_idle()
    time.sleep(0.2)
    assert harness.steps == idle
    assert harness.thread.stats()["out_of_credit"] == 1
    harness.thread.grant("a", 100)
    assert len(harness.collect("a")["a"]) == 2


def test_a_cancel_frees_blocks_before_the_next_step(harness: Harness) -> None:
    harness.thread.submit("a", PROMPT, Sampling(max_tokens=400, **GREEDY))
    harness.batches.get(timeout=20)
    harness.thread.cancel("a")
    harness.wait_idle()
    stats = harness.thread.stats()
    assert (stats["blocks_free"], stats["running"]) == (64, 0)
    assert stats["steps"] < 400
    harness.engine.check_integrity()


def test_a_refused_submit_answers_with_an_error_and_others_go_on(harness: Harness) -> None:
    harness.thread.submit("good", PROMPT, Sampling(max_tokens=20, **GREEDY))
    harness.thread.submit("bad", [], Sampling())
    outputs = harness.collect("good", "bad")
    assert isinstance(outputs["bad"][0].error, BadRequest)
    assert outputs["good"][-1].finish == "length"
    assert harness.crashes.empty()


def test_a_deadline_in_a_million_years_is_waited_for(harness: Harness) -> None:
    """Longer than a thread can wait."""
    harness.thread.submit(
        "a", PROMPT, Sampling(max_tokens=4, **GREEDY), credit=1, deadline=time.monotonic() + 3e13
    )
    harness.batches.get(timeout=20)
    harness.wait_idle()
    harness.thread.grant("a", 4)
    assert harness.collect("a")["a"][-1].finish == "length"
    assert harness.crashes.empty()


def test_a_deadline_wakes_a_sleeping_thread(harness: Harness) -> None:
    harness.thread.submit(
        "a", PROMPT, Sampling(**GREEDY), credit=0, deadline=time.monotonic() + 0.1
    )
    (output,) = harness.collect("a")["a"]
    assert isinstance(output.error, DeadlineExceeded)


def test_an_engine_that_breaks_reports_it_once_and_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise InternalError("out of cheese")

    monkeypatch.setattr(harness.engine.runner, "forward", broken)
    harness.thread.submit("a", PROMPT, Sampling())
    assert str(harness.crashes.get(timeout=20)) == "out of cheese"
    harness.thread.stop()
    assert harness.crashes.empty()
    assert harness.batches.empty()


def test_stop_ends_in_the_middle_of_work(harness: Harness) -> None:
    harness.thread.submit("a", PROMPT, Sampling(max_tokens=400, **GREEDY))
    harness.batches.get(timeout=20)
    harness.thread.stop()
    steps = harness.steps
    time.sleep(0.05)
    assert harness.steps == steps < 400
