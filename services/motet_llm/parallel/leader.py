"""Run a model as the leader of a group: what it does to its part, the other ranks do to theirs."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from motet_kernels.runtime.replay import can_replay
from motet_llm.attention.heavy_hitters import Watch
from motet_llm.cache.kv_cache import KvCache
from motet_llm.cache.state_cache import StateCache
from motet_llm.config import EngineConfig
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.scheduling.work import Work
from motet_llm.stages.states import StepStates
from motet_llm.weights import checkpoint
from motet_llm.weights import quantized_checkpoint as quantized
from motet_shared.errors import ConfigError

from . import commands as c
from .caches import LeaderKvCache, LeaderStateCache
from .collectives import GroupFailed, RankLost
from .cuts import fixed_tree
from .degrees import Degrees
from .group import Group, Rank
from .membership import Membership, breaking_off, shared_memory
from .processes import RankProcess
from .rank_runner import RankRunner
from .worker import Store, file_store

LOAD_TIMEOUT = 600.0  # seconds in which all ranks must have loaded their parts
ATTEMPTS = 2  # to form a group whose ranks are lost meanwhile, until a smaller one is formed

log = logging.getLogger(__name__)


def make_runner(config: EngineConfig) -> ModelRunner:
    """Return the runner of a model, of the leader if several ranks compute it.

    If ranks end while they load, or cannot be started, the group is formed again, then a smaller
    one. Raises RankLost if none can be formed, ConfigError for what the settings ask for.
    """
    degrees = Degrees.of(config)
    if degrees.ranks == 1:
        return _alone(config)
    # The ranks' share of the threads is set while a group is formed.
    config = replace(config, threads=config.threads or torch.get_num_threads())
    try:
        return _formed(config, degrees)
    except RankLost as error:
        lost = error
    while degrees.ranks > 1:
        degrees = degrees.smaller()
        log.warning(
            "a smaller group is formed", extra={"reason": lost.message, "ranks": degrees.ranks}
        )
        try:
            smaller = replace(
                config,
                tensor_parallel=degrees.tensor,
                pipeline_parallel=degrees.pipeline,
                expert_parallel=degrees.expert,
            )
            return _formed(smaller, degrees)
        except RankLost as error:
            lost = error
        except ConfigError as error:  # these degrees suit neither the model nor the memory
            log.warning("%s", error.message)
    raise lost


def _alone(config: EngineConfig) -> ModelRunner:
    """Return the runner of one rank, which sums as a group does if that is asked for and possible."""
    if not fixed_tree.serves_alone(config):
        return ModelRunner(config)
    folder = Path(config.model)
    model_config = checkpoint.load_config(folder, config.stage)
    if not fixed_tree.shards_of(model_config) or quantized.is_quantized(folder, model_config):
        return ModelRunner(config)
    seconds = config.collective_timeout
    return RankRunner(config, Membership(dist.HashStore(), 0, Degrees(), seconds, seconds))


def _formed(config: EngineConfig, degrees: Degrees) -> ModelRunner:
    """Return the runner of a group, formed again if ranks are lost meanwhile."""
    if degrees.ranks == 1:
        return _alone(config)
    for _ in range(ATTEMPTS - 1):
        try:
            return LeaderRunner(config, start_ranks(degrees.ranks))
        except RankLost as error:
            log.warning("the group is formed again", extra={"reason": error.message})
    return LeaderRunner(config, start_ranks(degrees.ranks))


def start_ranks(number: int) -> list[RankProcess]:
    """Start the processes of all ranks but the leader. Raises RankLost."""
    ranks: list[RankProcess] = []
    try:
        for rank in range(1, number):
            ranks.append(RankProcess(rank))
    except OSError as error:
        for started in ranks:
            started.close(at_once=True)
        raise RankLost(f"rank {len(ranks) + 1} cannot be started: {error}") from error
    return ranks


class LeaderRunner(RankRunner):
    """Run rank 0 of a group, and have the others follow.

    ranks: the others, which wait to join. store: makes the store in which all find each other.
    """

    def __init__(self, config: EngineConfig, ranks: Sequence[Rank], store: Store = file_store):
        self.ranks = Group(ranks, LOAD_TIMEOUT)
        self.others = self.ranks
        folder = tempfile.mkdtemp(prefix="motet-ranks-")
        try:
            path = str(Path(folder) / "store")
            super().__init__(config, self._join(config, ranks, store, path))
            self.ranks.limit(config.collective_timeout)
        except BaseException as error:
            cause: BaseException = error
            if isinstance(error, GroupFailed):
                cause = self.ranks.explain(error)
            self.ranks.close()
            raise self.ranks.refusal or cause from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _join(
        self, config: EngineConfig, ranks: Sequence[Rank], store: Store, path: str
    ) -> Membership:
        self.ranks.wait_started()
        settings = msgspec.json.encode(config)
        degrees = Degrees.of(config)
        memory = shared_memory(degrees, wanted=config.rank_memory)
        try:
            for rank in ranks:
                join = c.Join(rank.number, settings, path, LOAD_TIMEOUT, memory is not None)
                self.ranks.send_to(rank, join, memory)
            if memory is not None:
                self.ranks.break_off = breaking_off(memory, degrees)
                self.ranks.check()  # one may have failed before
            meeting, found = config.collective_timeout, store(path, degrees.ranks)
            member = self.ranks.watched(
                lambda: Membership(
                    found, 0, degrees, meeting, LOAD_TIMEOUT, memory, self.ranks.check
                )
            )
        finally:
            if memory is not None:
                os.close(memory)
        return member

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()

    def watch(self, on_failure: Callable[[BaseException], object]) -> None:
        """Have `on_failure` called, from any thread, if a rank ends or fails."""
        self.ranks.on_failure = on_failure
        if self.ranks.failure is not None:
            on_failure(self.ranks.failure)

    def forward(
        self,
        works: Sequence[Work],
        watched: Sequence[tuple[Watch, slice]] = (),
        given: StepStates | None = None,
    ) -> Forward:
        """Compute `works` with all ranks. Raises GroupFailed.

        given: None, because stages that take states are refused (`degrees.py`).
        """
        self.replays = can_replay()
        self.ranks.send(c.Forward([c.Row.of(work) for work in works], self.replays))
        with self.ranks.together():
            return super().forward(works, watched, given)

    def logits_of(self, rows: Sequence[int]) -> Tensor:
        """Return logits of any tokens of the last step, computed with all ranks."""
        self.ranks.send(c.LogitsOf([*rows]))
        with self.ranks.together():
            return super().logits_of(rows)

    @contextmanager
    def other_caches(self, num_sequences: int, length: int) -> Iterator[None]:
        """Use empty caches on all ranks."""
        self.ranks.send(c.UseOtherCaches(num_sequences, length))
        with super().other_caches(num_sequences, length):
            yield
        self.ranks.send(c.UseOwnCaches())

    def resize(self, blocks_per_group: int) -> None:
        self.ranks.send(c.Resize(blocks_per_group))
        super().resize(blocks_per_group)

    def _make_kv(self, num_blocks: int, block_size: int) -> KvCache:
        return LeaderKvCache(
            *self._kv_arguments(num_blocks, block_size),
            own=self._own_layers,
            others=self.ranks,
            degrees=self.degrees,
            heads=self._heads,
            stages=self._stages,
        )

    def _make_states(self, num_running: int, num_snapshots: int) -> StateCache | None:
        shapes = self._shapes.states
        if not shapes:
            return None
        return LeaderStateCache(
            shapes,
            num_running,
            num_snapshots,
            self.device,
            own=self._own_layers,
            others=self.ranks,
        )
