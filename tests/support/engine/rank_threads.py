"""Compute a model by a group of ranks within one process: a thread for each but the leader."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch.distributed as dist

from motet_kernels.rank_memory import RankMemory, create
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.parallel import commands, leader
from motet_llm.parallel.collectives import Collectives, GlooCollectives, SharedCollectives
from motet_llm.parallel.degrees import Degrees
from motet_llm.parallel.leader import LeaderRunner
from motet_llm.parallel.link import Link, pair
from motet_llm.parallel.worker import Follower, Store

Result = TypeVar("Result")
_LOADING = threading.Lock()  # transformers loads one model at a time in a process
_LOAD_TIMEOUT = 120.0  # seconds: the connections of a thread that has failed stay open
_load_model = ModelRunner._load_model


def loading_alone(self: ModelRunner, *args: Any) -> Any:
    """Load a model as `ModelRunner._load_model` does, while no other thread loads one."""
    with _LOADING:
        return _load_model(self, *args)


class RankThread:
    """Follow the leader on a thread; error: what ended it, None if its link did."""

    def __init__(self, number: int, store: Store):
        self.number = number
        self.error: BaseException | None = None
        own, its = pair()
        self.link: Link[commands.Report] = Link(own, commands.Report)
        self.follower = Follower(Link(its, commands.Command), store)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.follower.run()
        except BaseException as error:
            self.error = error
        finally:
            self.follower.link.shutdown()

    def ended(self) -> str:
        return "" if self._thread.is_alive() else f"ended with {self.error!r}"

    def close(self, *, at_once: bool = False) -> None:
        self.link.shutdown()
        self._thread.join(30)


@contextmanager
def group_engine(config: EngineConfig, **options: Any) -> Iterator[Engine]:
    """Provide an engine whose model is computed by threads; options: of the engine."""
    store = dist.HashStore()
    ranks = [RankThread(number, lambda *_: store) for number in range(1, Degrees.of(config).ranks)]
    with (
        patch.object(ModelRunner, "_load_model", loading_alone),
        patch.object(leader, "LOAD_TIMEOUT", _LOAD_TIMEOUT),
    ):
        runner = LeaderRunner(config, ranks, lambda *_: store)
    engine = Engine(config, runner, **options)
    try:
        yield engine
    finally:
        engine.close()
        runner.close()


def threads_of(
    ranks: int, compute: Callable[[Collectives], Result], *, shared: bool
) -> list[Result]:
    """Return what `compute` returns for each rank of a group of threads."""
    store, memory = dist.HashStore(), create(ranks)

    def run(rank: int) -> Result:
        if shared:
            return compute(SharedCollectives(RankMemory(memory, rank, ranks, 60.0), 60.0))
        return compute(GlooCollectives(store, rank, ranks, 60.0))

    try:
        with ThreadPoolExecutor(ranks) as pool:
            return [*pool.map(run, range(ranks))]
    finally:
        os.close(memory)
