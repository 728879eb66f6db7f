"""Steps that fail: who fails them ends, and all others get the tokens of an undisturbed run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.step_isolation import FRUITLESS_STEPS
from motet_llm.scheduling.budget import SMALLEST_CHUNK
from motet_llm.scheduling.work import Work
from motet_shared.errors import InternalError, MotetError, Overloaded
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.tiny_mixers import tiny_model

STREAMS = 7
TOKENS = 12
BAD = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "speculation": {"speculate": "ngram"},
    "no prefix cache": {"prefix_cache": False},
}
Fault = Callable[[Sequence[Work]], Exception | None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))


def make_engine(folder: Path, **settings: Any) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 96, "token_budget": 64, "max_running": 8}
    config = {"threads": 1, "overlap": False, **sizes, **settings}
    return Engine(EngineConfig(model=str(folder), **config))


def fail(engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Have steps raise what `fault` returns, after their keys and values are written."""
    forward = engine.runner.forward

    def failing(works: Sequence[Work], *rest: Any) -> Any:
        computed = forward(works, *rest)
        if (error := fault(works)) is not None:
            raise error
        return computed

    monkeypatch.setattr(engine.runner, "forward", failing)


def run(engine: Engine) -> dict[Hashable, list[int] | MotetError]:
    """Generate for all streams; their tokens, or the errors that they end with."""
    for key in range(STREAMS):
        prompt = [7, 8, 9, 10 + key, 11, 12, 10 + key, 11]
        engine.add(key, prompt, Sampling(temperature=float(key % 2), seed=key, max_tokens=TOKENS))
    found: dict[Hashable, list[int]] = {}
    errors: dict[Hashable, MotetError] = {}

    def note(outputs: list[StepOutput]) -> None:
        for output in outputs:
            found.setdefault(output.key, []).extend(output.ids)
            if output.error is not None:
                errors[output.key] = output.error

    for _ in range(1000):
        if not engine.has_work:
            break
        note(engine.step(note) if engine.config.overlap else engine.step())
        engine.check_integrity()
    return {**found, **errors}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("after", [0, 5])
def test_the_request_that_fails_its_steps_ends_alone(
    settings: str, after: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = run(make_engine(folder, **SETTINGS[settings]))
    engine = make_engine(folder, **SETTINGS[settings])

    def fault(works: Sequence[Work]) -> Exception | None:
        bad = any(work.request.key == BAD and work.request.num_output >= after for work in works)
        return ValueError("a bug of model code") if bad else None

    fail(engine, monkeypatch, fault)
    found = run(engine)
    error = found.pop(BAD)
    assert isinstance(error, InternalError)
    assert isinstance(error.__cause__, ValueError), "its traceback is logged"
    del due[BAD]
    assert found == due
    stats = engine.stats()
    assert (stats["isolated_requests"], stats["running"], stats["waiting"]) == (1, 0, 0)
    assert stats["blocks_free"] == stats["blocks_total"]


def test_a_step_that_does_not_fit_is_computed_in_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = run(make_engine(folder))
    engine = make_engine(folder)

    def fault(works: Sequence[Work]) -> Exception | None:
        large = sum(work.num_tokens for work in works) > 8
        return torch.OutOfMemoryError("out of memory") if large else None

    fail(engine, monkeypatch, fault)
    assert run(engine) == due
    assert engine.stats()["failed_steps"] > 0
    assert engine.stats()["isolated_requests"] == 0


def test_a_request_that_does_not_fit_alone_may_be_tried_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    fail(
        engine,
        monkeypatch,
        lambda works: MemoryError() if any(w.request.key == BAD for w in works) else None,
    )
    found = run(engine)
    assert isinstance(found[BAD], Overloaded)
    assert [key for key, one in found.items() if isinstance(one, MotetError)] == [BAD]


@pytest.mark.parametrize("overlap", [False, True])
def test_parts_of_a_step_do_not_share_memory_with_what_failed(
    overlap: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = run(make_engine(folder))
    engine = make_engine(folder, overlap=overlap)
    forward = engine.runner.forward
    activations: list[weakref.ref[torch.Tensor]] = []
    num_held: list[int] = []

    def activate() -> torch.Tensor:
        found = torch.zeros(8)
        activations.append(weakref.ref(found))
        return found

    def allocate() -> None:
        first = activate()
        raise MemoryError(len(first))

    def failing(works: Sequence[Work], *rest: Any) -> Any:
        num_held.append(sum(one() is not None for one in activations))
        last = activate()
        if len(works) > 1:
            try:
                allocate()
            except MemoryError as error:
                raise torch.OutOfMemoryError(len(last)) from error
        return forward(works, *rest)

    monkeypatch.setattr(engine.runner, "forward", failing)
    assert run(engine) == due
    assert len(activations) > STREAMS
    assert not any(num_held)


class _Broken:
    """A grammar state that cannot be followed."""

    ended = may_end = False

    def fill(self, bits_W: Any, stop_ids: Any) -> None:
        raise RuntimeError("no mask")

    def accept(self, ids: Any) -> bool:
        return True


def test_a_grammar_that_cannot_be_followed_ends_its_request_alone(folder: Path) -> None:
    for overlap in (False, True):
        due = run(make_engine(folder, overlap=overlap))
        engine = make_engine(folder, overlap=overlap)
        broken: Any = _Broken()
        engine.add("broken", [7, 8], Sampling(temperature=0), grammar_state=broken)
        found = run(engine)
        assert isinstance(found.pop("broken"), InternalError)
        assert found == due


def test_states_that_cannot_be_computed_twice_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("lfm2").save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    fail(engine, monkeypatch, lambda works: ValueError("a bug"))
    engine.add("one", [1, 2, 3], Sampling(temperature=0, max_tokens=4))
    with pytest.raises(ValueError, match="a bug"):
        engine.step()


@pytest.mark.parametrize("error", [ValueError("a broken device"), MemoryError("a broken device")])
def test_an_engine_that_computes_nothing_any_more_ends(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)
    fail(engine, monkeypatch, lambda works: error)
    for number in range(FRUITLESS_STEPS - 1):
        engine.add(number, [1, 2, 3], Sampling(temperature=0.0, max_tokens=4))
        (output,) = engine.step()
        assert isinstance(output.error, InternalError | Overloaded)
    engine.add("last", [1, 2, 3], Sampling(temperature=0.0, max_tokens=4))
    with pytest.raises(type(error), match="a broken device"):
        engine.step()


def test_prompts_that_do_not_fit_leave_an_idle_engine_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder)

    def fault(works: Sequence[Work]) -> Exception | None:
        large = sum(work.num_tokens for work in works) > SMALLEST_CHUNK
        return MemoryError() if large else None

    fail(engine, monkeypatch, fault)
    for number in range(2 * FRUITLESS_STEPS):
        engine.add(number, [1, 2] * SMALLEST_CHUNK, Sampling(temperature=0.0, max_tokens=4))
        (output,) = engine.step()
        assert isinstance(output.error, Overloaded)
    assert len(run(engine)) == STREAMS
    assert engine.stats()["isolated_requests"] == 2 * FRUITLESS_STEPS
