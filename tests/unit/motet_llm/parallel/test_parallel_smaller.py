"""A group whose ranks are lost while they load is formed again, then a smaller one with the same tokens."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.parallel import commands, leader
from motet_llm.parallel.collectives import RankLost
from motet_llm.parallel.degrees import Degrees
from motet_llm.parallel.worker import file_store
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.engine.rank_families import SMALL
from support.engine.rank_threads import RankThread, loading_alone
from support.families import language_families as families

LONG = 100.0  # seconds that ranks wait for each other, much more than a start takes
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


@pytest.mark.parametrize(
    ("degrees", "sequence"),
    [
        (Degrees(tensor=4), [2, 1]),
        (Degrees(tensor=6), [3, 1]),
        (Degrees(pipeline=3), [2, 1]),
        (Degrees(expert=4), [3, 2, 1]),
        (Degrees(tensor=2, expert=2), [1]),
        (Degrees(tensor=2, pipeline=3), [4, 2, 1]),
    ],
)
def test_smaller_degrees_follow_each_other(degrees: Degrees, sequence: list[int]) -> None:
    found = []
    while degrees.ranks > 1:
        degrees = degrees.smaller()
        found.append(degrees.ranks)
    assert found == sequence


class LeavingRank(RankThread):
    """Leave when the group is joined, as a process that is killed while it loads."""

    def _run(self) -> None:
        def leave(command: commands.Command) -> None:
            raise EOFError

        self.follower._do = leave  # type: ignore[method-assign]
        super()._run()


class Starts:
    """Start groups of threads, of which some lose a rank; sizes: of the groups that were started."""

    def __init__(self, losing: dict[int, int]):
        self._losing = dict(losing)
        self.sizes: list[int] = []

    def __call__(self, ranks: int) -> list[RankThread]:
        self.sizes.append(ranks)
        left = self._losing.get(ranks, 0)
        self._losing[ranks] = left - 1
        return [
            (LeavingRank if left > 0 and number == ranks - 1 else RankThread)(number, file_store)
            for number in range(1, ranks)
        ]


def tokens(engine: Engine) -> list[int]:
    engine.add("one", PROMPT, Sampling(temperature=0, max_tokens=16, ignore_eos=True))
    found: list[int] = []
    while engine.has_work:
        found += [token for output in engine.step() for token in output.ids]
    return found


def settings(name: str, folder: Path, **given: Any) -> EngineConfig:
    torch.set_num_threads(1)
    families.write_checkpoint(name, folder)
    return EngineConfig(**SMALL | {"model": str(folder), "collective_timeout": 2.0} | given)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(losing: dict[int, int]) -> Starts:
        found = Starts(losing)
        monkeypatch.setattr(leader, "start_ranks", found)
        monkeypatch.setattr(ModelRunner, "_load_model", loading_alone)
        monkeypatch.setattr(leader, "LOAD_TIMEOUT", 120.0)
        return found

    return use


@pytest.mark.parametrize(
    ("losing", "sizes", "ranks"),
    [({4: 1}, [4, 4], 4), ({4: 2}, [4, 4, 3], 3)],
)
def test_experts_are_computed_by_the_ranks_that_are_left(
    losing: dict[int, int], sizes: list[int], ranks: int, starts: Any, tmp_path: Path
) -> None:
    config = settings("Qwen3MoeForCausalLM", tmp_path, expert_parallel=4)
    alone = Engine(replace(config, expert_parallel=1))
    expected = tokens(alone)
    alone.close()
    started = starts(losing)
    group = Engine(config)
    try:
        assert started.sizes == sizes
        assert group.runner.describe()["group"] == f"expert_parallel={ranks}"
        assert tokens(group) == expected
    finally:
        group.close()


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_a_rank_that_is_lost_before_the_ranks_meet_is_noticed_at_once(
    degrees: dict[str, int], shares: bool, starts: Any, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"collective_timeout": LONG, "rank_memory": shares}
    config = settings("Qwen2ForCausalLM", tmp_path, **degrees, **given)
    started = starts({2: 1})
    began = time.monotonic()
    engine = Engine(config)
    assert time.monotonic() - began < LONG / 2
    assert started.sizes == [2, 2]
    assert len(tokens(engine)) == 16
    engine.close()


def test_a_leader_is_left_alone(starts: Any, tmp_path: Path) -> None:
    config = settings("LlamaForCausalLM", tmp_path, tensor_parallel=2)
    started = starts({2: leader.ATTEMPTS})
    engine = Engine(config)
    assert started.sizes == [2] * leader.ATTEMPTS
    assert "group" not in engine.runner.describe()
    assert len(tokens(engine)) == 16
    engine.close()


def test_a_smaller_group_that_does_not_fit_is_a_lost_rank_not_a_wrong_setting(
    starts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The supervisor starts the worker again after the one, and not after the other."""

    def refuse(_: EngineConfig) -> ModelRunner:
        raise ConfigError("memory=1: give more", param="memory")

    config = settings("LlamaForCausalLM", tmp_path, tensor_parallel=2)
    starts({2: leader.ATTEMPTS})
    monkeypatch.setattr(leader, "ModelRunner", refuse)
    with pytest.raises(RankLost, match=r"^rank 1 "):
        Engine(config)


def test_a_refusal_is_final(starts: Any, tmp_path: Path) -> None:
    config = settings("LlamaForCausalLM", tmp_path, tensor_parallel=3)
    started = starts({})
    with pytest.raises(ConfigError, match="tensor_parallel=3"):
        Engine(config)
    assert started.sizes == [3]


def test_ranks_that_cannot_be_started_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_number: int) -> Any:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(leader, "RankProcess", refuse)
    with pytest.raises(RankLost, match=r"rank 1 cannot be started: no more processes"):
        leader.start_ranks(3)
