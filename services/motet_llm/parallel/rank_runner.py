"""Run the part of a model that one rank of a group holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from motet_kernels.runtime.device import dtype_name
from motet_llm.adapters.bank import AdapterBank
from motet_llm.attention.heavy_hitters import Watch
from motet_llm.attention.paged import ShapeProbe
from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.cache.state_cache import StateCache, StateShape
from motet_llm.config import EngineConfig
from motet_llm.engine.memory_budget import MemoryBudget, expected_weight_bytes
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.step_memory import StepMemory
from motet_llm.scheduling.work import Work
from motet_llm.stages.states import StepStates
from motet_llm.weights import quantized_checkpoint as quantized
from motet_models.capacity import KvLayout
from motet_shared.errors import ConfigError

from .adapters import Ranges, RankAdapterBank, whole_shapes
from .caches import Others, RankKvCache, RankStateCache
from .collectives import Alone
from .cuts import agreement
from .cuts.expert_cut import ExpertCut
from .cuts.fixed_tree import FixedTree, refusal, shards_of
from .cuts.pipeline_cut import PipelineCut
from .cuts.plan import Plan, expert_plan, has_expert_plan, has_tensor_plan, tensor_plan
from .cuts.sums import PlainSums
from .cuts.tensor_cut import TensorCut
from .cuts.tree_experts import TreeExpertCut, can_cut
from .degrees import Degrees
from .membership import Membership


def settings_of_rank(config: EngineConfig) -> EngineConfig:
    """Return the settings of one rank: its share of the group's cores and memory."""
    degrees = Degrees.of(config)
    ranks = degrees.ranks
    return replace(
        config,
        threads=max(1, (config.threads or torch.get_num_threads()) // ranks),
        memory=config.memory // ranks,
        memory_share=config.memory_share / ranks,
        kv_memory=config.kv_memory // degrees.width,  # a block has all stages' layers
        packed_cache=0,  # packed parts are not kept yet
        wait_for_exit=(),
        memory_gate=None,
    )


class RankRunner(ModelRunner):
    """Hold a rank's part of the model and of its caches.

    config: of the whole group. member: connects the rank to the others. others: the other ranks, if
    this one leads.
    """

    others: Others | None = None
    replays = True  # whether the next step may be replayed

    def __init__(self, config: EngineConfig, member: Membership):
        self.member = member
        self.degrees = member.degrees
        self._own_layers: set[int] = set()  # those with a cache
        self._stages: dict[int, int] = {}  # of each layer with keys and values
        self._heads: dict[int, int] = {}  # key/value heads of each layer in the whole model
        self._whole: dict[str, tuple[int, int]] = {}  # shapes of matrices that are not cut
        self._ranges: Ranges = {}
        self._deterministic = config.deterministic
        super().__init__(settings_of_rank(config))
        member.limit(config.collective_timeout)

    def _load_model(
        self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype
    ) -> PreTrainedModel:
        """Return the rank's part of the model. Raises ConfigError if it cannot be cut."""
        if self.image_shape is not None and self.degrees.pipeline > 1:
            raise ConfigError(
                f"pipeline_parallel={self.degrees.pipeline}: model_type={config.model_type!r} reads"
                " pictures, which also enter between layers; give tensor_parallel instead",
                param="pipeline_parallel",
            )
        if quantized.is_quantized(folder, config):
            raise ConfigError(
                f"{self._settings}: {folder} holds matrices as codes, which are not cut yet; give the"
                " original weights, or one rank"
            )
        model = super()._load_model(folder, config, dtype)
        self.packing.packer.before_each = self.member.check
        self._whole = whole_shapes(model)
        whole_NV = None
        if self.member.rank == 0:
            whole_NV, self._heads = agreement.first_logits(model)
        self._cut(model)
        cut_NV = agreement.logits_of_cut(model, self._settings)
        if whole_NV is not None:
            agreement.check(model, whole_NV, cut_NV, self._settings)
        return model

    @property
    def _settings(self) -> str:
        named = self.degrees.settings()
        found = ", ".join(f"{name}={value}" for name, value in named.items() if value > 1)
        return found or "one rank"

    def describe(self) -> dict[str, str]:
        """Return what `ModelRunner.describe` does, and the degrees of the group."""
        return super().describe() | {"group": self._settings}

    def _cut(self, model: PreTrainedModel) -> None:
        if self.degrees.pipeline > 1:
            PipelineCut(model, self.member).run()
        if self._deterministic:
            self._cut_in_tree(model)
            return
        experts = expert_plan(model) if self.degrees.expert > 1 else Plan({})
        if self.degrees.tensor > 1:
            plan = tensor_plan(model)
            kept = {
                name: style for name, style in plan.styles.items() if name not in experts.styles
            }
            stage = self.member.stage
            cut = TensorCut(model, Plan(kept), stage, PlainSums(stage))
            cut.run()
            self._ranges = cut.ranges
        if experts.styles:
            ExpertCut(model, experts, self.member.stage).run()

    def _cut_in_tree(self, model: PreTrainedModel) -> None:
        """Cut a model for sums of the same bits at every degree. Raises ConfigError."""
        degrees, stage, shards = self.degrees, self.member.stage, shards_of(model.config)
        if not shards or shards % degrees.width:
            field = "tensor_parallel" if degrees.tensor > 1 else "expert_parallel"
            raise refusal(field, degrees.width, shards)
        dense = tensor_plan(model) if degrees.tensor > 1 or has_tensor_plan(model) else Plan({})
        experts = expert_plan(model) if degrees.expert > 1 or has_expert_plan(model) else Plan({})
        if degrees.width == 1 and not can_cut(model, (dense, experts)):
            return
        is_by_expert = degrees.expert > 1
        TreeExpertCut(model, (dense, experts), stage, shards, is_by_expert=is_by_expert).run()
        if dense.styles:
            among = stage if degrees.tensor > 1 else Alone()
            cut = TensorCut(model, dense, among, FixedTree(among, shards))
            cut.run()
            self._ranges = cut.ranges

    def _measure_memory(
        self, config: EngineConfig, model_config: PreTrainedConfig
    ) -> MemoryBudget | None:
        if config.num_blocks or config.kv_memory:
            return None
        folder, budget = Path(config.model), MemoryBudget.measure(config, self.device)
        budget.check_weights(
            expected_weight_bytes(folder, self._weights, False) // self.degrees.ranks
        )
        return budget

    def _blocks_in_memory(self, config: EngineConfig, layout: KvLayout, staging: int) -> int:
        """Return the blocks that every rank has room for."""
        return self.member.everyone.smallest(super()._blocks_in_memory(config, layout, staging))

    def _memory_for_kv(self, config: EngineConfig, layout: KvLayout) -> int:
        """Return the bytes of blocks of all stages' layers, of which this stage holds its part."""
        return super()._memory_for_kv(config, layout) * self.degrees.pipeline

    @torch.inference_mode()
    def _probe(self) -> ShapeProbe:
        """Return the shapes of all stages' layers: their blocks have the same tables."""
        probe = super()._probe()
        self._own_layers = {*probe.layers, *probe.states}
        self._stages = dict.fromkeys(probe.layers, self.member.number)
        if self.degrees.pipeline > 1:
            found = self.member.exchange("shapes", msgspec.json.encode(_Shapes.of(probe)).decode())
            for rank, content in enumerate(found):
                shapes = msgspec.json.decode(content, type=_Shapes)
                self._stages |= dict.fromkeys(shapes.layers, self.degrees.stage(rank))
                shapes.add_to(probe)
        return probe

    def _make_kv(self, num_blocks: int, block_size: int) -> KvCache:
        return RankKvCache(*self._kv_arguments(num_blocks, block_size), own=self._own_layers)

    def _make_states(self, num_running: int, num_snapshots: int) -> StateCache | None:
        shapes = self._shapes.states
        if not shapes:
            return None
        return RankStateCache(shapes, num_running, num_snapshots, self.device, own=self._own_layers)

    @property
    def _bank_class(self) -> Callable[..., AdapterBank]:
        own = {name for name, _ in self.model.named_modules()}
        return partial(
            RankAdapterBank,
            whole=self._whole,
            ranges=self._ranges,
            absent=lambda name: name not in own,
            others=self.others,
        )

    def forward(
        self,
        works: Sequence[Work],
        watched: Sequence[tuple[Watch, slice]] = (),
        given: StepStates | None = None,
    ) -> Forward:
        """Compute `works` with the other ranks. Raises GroupFailed."""
        with self.member.stage.explained():
            return super().forward(works, watched, given)

    def _memory(self, works: Sequence[Work], num_blocks: int) -> StepMemory | None:
        """Return the memory of a step that may be replayed: its sums are native calls, too."""
        is_whole = self.degrees.pipeline == 1  # hidden states are not sent within a recording
        may_replay = self.replays and self.member.stage.replays()
        if self._deterministic or not is_whole or not may_replay:
            return None
        return super()._memory(works, num_blocks)


class _Shapes(msgspec.Struct):
    """Carry what the layers of a stage keep; types by name."""

    layers: dict[int, LayerShape]
    states: dict[int, tuple[tuple[tuple[int, ...], ...], str]]

    @classmethod
    def of(cls, probe: ShapeProbe) -> _Shapes:
        states = {
            layer: (shape.shapes, dtype_name(shape.dtype)) for layer, shape in probe.states.items()
        }
        return cls(dict(probe.layers), states)

    def add_to(self, probe: ShapeProbe) -> None:
        """Add the layers of other stages to those of one."""
        for layer, shape in self.layers.items():
            probe.layers.setdefault(layer, shape)
        for layer, (shapes, dtype) in self.states.items():
            probe.states.setdefault(layer, StateShape(shapes, getattr(torch, dtype)))
