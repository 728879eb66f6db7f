"""A rank that fails, hangs or leaves ends its group with a reason; nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.parallel.collectives import GroupFailed
from motet_llm.parallel.leader import LeaderRunner
from motet_llm.parallel.rank_runner import RankRunner
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.engine.rank_threads import RankThread, group_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@contextmanager
def group(folder: Path, timeout: float) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        num_blocks=40,
        packed_cache=0,
        tensor_parallel=2,
        collective_timeout=timeout,
    )
    with group_engine(config) as engine:
        yield engine


def leader_of(engine: Engine) -> LeaderRunner:
    assert isinstance(engine.runner, LeaderRunner)
    return engine.runner


def other_of(engine: Engine) -> RankRunner:
    (rank,) = leader_of(engine).ranks.ranks
    assert isinstance(rank, RankThread)
    assert rank.follower.runner is not None
    return rank.follower.runner


def ask(engine: Engine) -> None:
    engine.add("one", [1, 2, 3], Sampling(temperature=0, max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()


def test_a_rank_that_fails_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("a broken cache line")

    with group(folder, timeout=1.0) as engine:
        failures: list[BaseException] = []
        leader_of(engine).watch(failures.append)
        monkeypatch.setattr(other_of(engine), "forward", fail)
        with pytest.raises(GroupFailed, match=r"^rank 1: .*a broken cache line"):
            ask(engine)
        assert [str(failure) for failure in failures] == [str(leader_of(engine).ranks.failure)]


def test_a_rank_that_hangs_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    awake = threading.Event()
    with group(folder, timeout=0.5) as engine:
        monkeypatch.setattr(other_of(engine), "forward", lambda *_: awake.wait(60))
        with pytest.raises(GroupFailed, match=r"collective_timeout=0\.5"):
            ask(engine)
        with pytest.raises(GroupFailed, match="collective_timeout"):
            leader_of(engine).ranks.send(None)  # type: ignore[arg-type]  # not even looked at
        awake.set()


def test_an_error_of_the_leader_in_a_step_ends_the_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have computed what it has not: no part of the step may be computed again."""

    def fail(*_: Any) -> None:
        raise ValueError("not enough of anything")

    with group(folder, timeout=1.0) as engine:
        monkeypatch.setattr(engine.runner, "_launched", fail)
        with pytest.raises(GroupFailed, match=r"^rank 0: ValueError\('not enough of anything'\)"):
            ask(engine)


def test_a_rank_that_leaves_is_noticed_while_nothing_is_computed(folder: Path) -> None:
    noticed = threading.Event()
    with group(folder, timeout=1.0) as engine:
        leader_of(engine).watch(lambda _: noticed.set())
        (rank,) = leader_of(engine).ranks.ranks
        assert isinstance(rank, RankThread)
        rank.follower.link.shutdown()
        assert noticed.wait(30)
        assert "rank 1" in str(leader_of(engine).ranks.failure)
