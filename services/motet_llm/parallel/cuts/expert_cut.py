"""Cut a loaded model's mixtures: each rank of a stage keeps whole experts."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from motet_llm.parallel.collectives import Collectives
from motet_shared.errors import ConfigError

from .cut_modules import LocalExperts
from .plan import Plan
from .shares import divide


class ExpertCut:
    """Give each rank of a stage whole experts of a model, in place."""

    def __init__(self, model: PreTrainedModel, plan: Plan, group: Collectives):
        self._model, self._plan, self._group = model, plan, group

    def run(self) -> None:
        """Cut all experts that the plan names. Raises ConfigError by name."""
        found = 0
        for path, parent in list(self._model.named_modules()):
            for name, child in list(parent.named_children()):
                if self._plan.of(f"{path}.{name}") == "ep_dispatch_experts":
                    setattr(parent, name, self._local(f"{path}.{name}", child))
                    found += 1
        if not found:
            raise self._refusal("it has no experts that its plan names")

    def _local(self, full: str, experts: Any) -> LocalExperts:
        number = getattr(experts, "num_experts", None)
        if not isinstance(number, int) or number < self._group.size:
            raise self._refusal(f"{full} has {number} experts")
        own = divide(number, self._group.rank, self._group.size)
        for name, parameter in experts.named_parameters(recurse=False):
            if self._plan.of(f"{full}.{name}") == "grouped_gemm" or name.endswith("_bias"):
                parameter.data = parameter.data[own.begin : own.end]
        experts.num_experts = own.width
        experts._is_expert_parallel = True  # an index beyond them is no expert's
        return LocalExperts(experts, self._group, own)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"expert_parallel={self._group.size}: model_type={self._model.config.model_type!r}:"
            f" {reason}; give fewer, or 1",
            param="expert_parallel",
        )
