"""Run the part of a model that one rank of a group holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from motet_llm.config import EngineConfig
from motet_llm.engine.memory_budget import MemoryBudget, expected_weight_bytes
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.engine.step_memory import StepMemory
from motet_llm.models.language_model import ImageEmbeddingShape
from motet_llm.scheduling.work import Work
from motet_llm.weights import quantized_checkpoint as quantized
from motet_models.capacity import KvLayout
from motet_shared.errors import ConfigError

from . import agreement
from .collectives import Collectives
from .degrees import Degrees
from .plan import Plan, expert_plan, tensor_plan
from .tensor_cut import ExpertCut, TensorCut


def settings_of_rank(config: EngineConfig) -> EngineConfig:
    """Return the settings of one rank: its share of the group's cores and memory."""
    ranks = Degrees.of(config).ranks
    return replace(
        config,
        threads=max(1, (config.threads or os.cpu_count() or 1) // ranks),
        memory=config.memory // ranks,
        memory_share=config.memory_share / ranks,
        kv_memory=config.kv_memory // ranks,
        packed_cache=0,  # packed parts are not kept yet
        wait_for_exit=(),
    )


class RankRunner(ModelRunner):
    """Hold a rank's part of the model and of its caches.

    config: of the whole group. group: connects the ranks.
    """

    def __init__(self, config: EngineConfig, group: Collectives):
        self.group = group
        self.degrees = Degrees.of(config)
        super().__init__(settings_of_rank(config))
        group.limit(config.collective_timeout)

    def _load_model(
        self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype
    ) -> PreTrainedModel:
        """Return the rank's part of the model. Raises ConfigError if it cannot be cut."""
        _check_images(self.image_shape)
        if quantized.is_quantized(folder, config):
            raise ConfigError(
                f"tensor_parallel={self.degrees.tensor}: {folder} holds matrices as codes, which are"
                " not cut yet; give the original weights, or one rank",
                param="tensor_parallel",
            )
        model = super()._load_model(folder, config, dtype)
        whole_NV = agreement.first_logits(model) if self.group.rank == 0 else None
        self._cut(model)
        cut_NV = agreement.first_logits(model)
        if whole_NV is not None:
            agreement.check(model, whole_NV, cut_NV, self._settings)
        return model

    @property
    def _settings(self) -> str:
        degrees = self.degrees
        named = {
            "tensor_parallel": degrees.tensor,
            "pipeline_parallel": degrees.pipeline,
            "expert_parallel": degrees.expert,
        }
        return ", ".join(f"{name}={value}" for name, value in named.items() if value > 1)

    def _cut(self, model: PreTrainedModel) -> None:
        experts = expert_plan(model) if self.degrees.expert > 1 else Plan({})
        if self.degrees.tensor > 1:
            plan = tensor_plan(model)
            kept = {
                name: style
                for name, style in plan.styles.items()
                if name not in experts.styles
            }
            TensorCut(model, Plan(kept), self.group).run()
        if experts.styles:
            ExpertCut(model, experts, self.group).run()

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
        return self.group.smallest(super()._blocks_in_memory(config, layout, staging))

    def _memory(self, works: Sequence[Work], num_blocks: int) -> StepMemory | None:
        """Return None: a recorded step would leave out the sums between ranks."""
        return None


def _check_images(shape: ImageEmbeddingShape | None) -> None:
    if shape is not None:
        raise ConfigError(
            "tensor_parallel: models that read pictures are not computed by groups yet; give one"
            " rank",
            param="tensor_parallel",
        )
