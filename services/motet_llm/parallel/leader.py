"""Run a model as the leader of a group: what it does to its part, the other ranks do to theirs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from torch import Tensor

from motet_llm.attention.heavy_hitters import Watch
from motet_llm.cache.kv_cache import KvCache
from motet_llm.cache.state_cache import StateCache
from motet_llm.config import EngineConfig
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.scheduling.work import Work
from motet_llm.stages.states import StepStates

from . import commands as c
from .caches import LeaderKvCache, LeaderStateCache
from .collectives import GroupFailed
from .degrees import Degrees
from .group import Group, Rank
from .membership import Membership
from .processes import RankProcess
from .rank_runner import RankRunner
from .worker import Store, file_store

LOAD_TIMEOUT = 600.0  # seconds in which all ranks must have loaded their parts


def make_runner(config: EngineConfig) -> ModelRunner:
    """Return the runner of a model, of the leader if several ranks compute it."""
    ranks = Degrees.of(config).ranks
    if ranks == 1:
        return ModelRunner(config)
    return LeaderRunner(config, [RankProcess(number) for number in range(1, ranks)])


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
        for rank in ranks:
            self.ranks.send_to(rank, c.Join(rank.number, settings, path, LOAD_TIMEOUT))
        degrees = Degrees.of(config)
        return Membership(store(path, degrees.ranks), 0, degrees, LOAD_TIMEOUT)

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
        self.ranks.send(c.Forward([c.Row.of(work) for work in works]))
        with self.ranks.together():
            return super().forward(works, watched, given)

    def logits_of(self, rows: Sequence[int]) -> Tensor:
        """Return logits of any tokens of the last step, computed with all ranks."""
        self.ranks.send(c.LogitsOf([*rows]))
        with self.ranks.together():
            return super().logits_of(rows)

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
