"""Resolve how a model is cut: transformers' plans, by the names of the model's own modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from motet_llm.weights.checkpoint import backbone
from motet_shared.errors import ConfigError

# Styles that leave the forward pass as it is: each rank computes all of it.
WHOLE = {"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate"}
CUT = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "moe_tp_experts",
    "all_reduce",
    "grouped_gemm",
    "ep_dispatch_experts",
}
_EMBEDDING = "embedding_rowwise"  # of the vocabulary: every rank keeps it whole


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the style in which each module or parameter is cut, by its name with `*` for numbers."""

    styles: Mapping[str, str]

    def of(self, name: str) -> str | None:
        """Return the style of a module or parameter; None: every rank has it whole."""
        style = self.styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
        return None if style in WHOLE else style


def tensor_plan(model: PreTrainedModel) -> Plan:
    """Return the plan by which ranks share matrices. Raises ConfigError if the family has none."""
    return _plan(model, "base_model_tp_plan", "tensor_parallel")


def expert_plan(model: PreTrainedModel) -> Plan:
    """Return the plan by which ranks share experts. Raises ConfigError if the family has none."""
    plan = _plan(model, "base_model_ep_plan", "expert_parallel")
    kept = ("grouped_gemm", "ep_dispatch_experts")
    return Plan({name: style for name, style in plan.styles.items() if style in kept})


def has_tensor_plan(model: PreTrainedModel) -> bool:
    """Return True if the family has a plan by which ranks share matrices."""
    return bool(getattr(model.config, "base_model_tp_plan", None))


def has_expert_plan(model: PreTrainedModel) -> bool:
    """Return True if the family has a plan by which ranks share experts."""
    return bool(getattr(model.config, "base_model_ep_plan", None))


def _plan(model: PreTrainedModel, field: str, setting: str) -> Plan:
    given: dict[str, str] | None = getattr(model.config, field, None)
    if not given:
        raise ConfigError(
            f"{setting}: transformers has no plan for model_type={model.config.model_type!r}"
            f" ({field}); give 1, or pipeline_parallel",
            param=setting,
        )
    base = next(name for name, module in model.named_modules() if module is backbone(model))
    prefix = f"{base}." if base else ""
    styles = {
        f"{prefix}{name}": style
        for name, style in given.items()
        if not (style == _EMBEDDING and "." not in name)
    }
    if unknown := sorted(set(styles.values()) - CUT - WHOLE):
        raise ConfigError(
            f"{setting}: model_type={model.config.model_type!r} is cut in ways that are not"
            f" supported ({', '.join(unknown)}); give 1, or pipeline_parallel",
            param=setting,
        )
    return Plan(styles)


def number_of(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of these numbers that a module or its config has."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
