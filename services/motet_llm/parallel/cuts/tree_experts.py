"""Compute a mixture's experts in virtual shards, summed in one fixed tree: the same bits at every degree.

Each expert's inner features are cut into as many shards as other summed matrices are, and experts
are cut into as many groups of neighbours. A shard's sums over the experts of each group are added
in pairs of groups, then the shards' in pairs of shards. Ranks that share matrices (`tensor`) hold
some shards of all experts; ranks that share experts hold all shards of some groups: both hold whole
subtrees.

Shapes: T tokens, k experts of each, H hidden size, G groups, S shards of a rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_llm.models.experts import PackedExperts, is_experts, parameters_of
from motet_llm.parallel.collectives import Collectives, add_in_pairs
from motet_shared.errors import ConfigError

from .plan import Plan
from .shares import Share, divide

# Styles of plans that name a module of experts.
STYLES = ("moe_tp_experts", "all_reduce", "ep_dispatch_experts")


class TreeExpertCut:
    """Cut all experts of a model, in place, for a rank of a group.

    shards: of `fixed_tree.shards_of`. is_by_expert: ranks share the experts; otherwise their
    matrices.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plans: Sequence[Plan],
        group: Collectives,
        shards: int,
        *,
        is_by_expert: bool,
    ):
        self._model, self._plans, self._group = model, plans, group
        self._shards, self._is_by_expert = shards, is_by_expert

    def run(self) -> None:
        """Cut the experts. Raises ConfigError by name."""
        found = find_experts(self._model, self._plans)
        if self._is_by_expert and not found:
            raise self._refusal("it has no experts that its plan names")
        for path, parent, name in found:
            setattr(parent, name, self._cut(f"{path}.{name}", getattr(parent, name)))

    def _cut(self, full: str, experts: Any) -> TreeExperts:
        if not is_experts(experts):
            raise self._refusal(f"{full} is not summed in a fixed tree")
        number = getattr(experts, parameters_of(experts)[-1]).shape[0]
        if self._is_by_expert and number < self._group.size:
            raise self._refusal(f"{full} has {number} experts")
        own = _own(self._group, self._shards)
        every = range(self._shards)
        groups = [divide(number, n, self._shards) for n in (own if self._is_by_expert else every)]
        held = Share(groups[0].begin, groups[-1].end)
        parts = [
            _shard(experts, held, shard, self._shards)
            for shard in (every if self._is_by_expert else own)
        ]
        for name in [name for name, _ in experts.named_parameters(recurse=False)]:
            delattr(experts, name)
        return TreeExperts(parts, held, groups, self._group, is_by_expert=self._is_by_expert)

    def _refusal(self, reason: str) -> ConfigError:
        field = "expert_parallel" if self._is_by_expert else "tensor_parallel"
        return ConfigError(
            f"{field}={self._group.size}: deterministic=true:"
            f" model_type={self._model.config.model_type!r}: {reason}; leave deterministic off, or"
            " give one rank",
            param=field,
        )


def find_experts(model: PreTrainedModel, plans: Sequence[Plan]) -> list[tuple[str, nn.Module, str]]:
    """Return the modules that plans name as experts: path of the parent, parent, and name."""
    return [
        (path, parent, name)
        for path, parent in list(model.named_modules())
        for name, _ in list(parent.named_children())
        if any(plan.of(f"{path}.{name}") in STYLES for plan in plans)
    ]


def can_cut(model: PreTrainedModel, plans: Sequence[Plan]) -> bool:
    """Return True if all experts of a model can be summed in a tree."""
    found = find_experts(model, plans)
    return all(is_experts(getattr(parent, name)) for _, parent, name in found)


def _own(group: Collectives, shards: int) -> range:
    each = shards // group.size
    return range(group.rank * each, (group.rank + 1) * each)


def _shard(experts: Any, held: Share, shard: int, shards: int) -> nn.Module:
    """Return a module with one shard of the inner features of some experts."""
    part = copy.copy(experts)
    part._parameters = dict(experts._parameters)
    first, last = parameters_of(experts)
    across, along = (2, 1) if experts.is_transposed else (1, 2)
    own = divide(getattr(experts, last).shape[along], shard, shards)
    gate_up = getattr(experts, first)[held.begin : held.end]
    _put(part, first, _features(experts, gate_up, across, own))
    down = getattr(experts, last)[held.begin : held.end]
    _put(part, last, down.narrow(along, own.begin, own.width))
    if (bias := getattr(experts, f"{first}_bias", None)) is not None:
        _put(part, f"{first}_bias", _features(experts, bias[held.begin : held.end], 1, own))
    if (bias := getattr(experts, f"{last}_bias", None)) is not None:
        _put(part, f"{last}_bias", bias[held.begin : held.end] * (shard == 0))
    part.num_experts = held.width
    part._is_expert_parallel = True  # an index beyond them is no expert's
    return part  # type: ignore[no-any-return]


def _features(experts: Any, whole: Tensor, axis: int, own: Share) -> Tensor:
    """Return features of the first product: of gate and up, if there is a gate."""
    if not experts.has_gate:
        return whole.narrow(axis, own.begin, own.width)
    if not getattr(experts, "is_concatenated", True):
        return whole.narrow(axis, 2 * own.begin, 2 * own.width)
    halves = (half.narrow(axis, own.begin, own.width) for half in whole.chunk(2, dim=axis))
    return torch.cat(list(halves), dim=axis)


def _put(module: Any, name: str, value: Tensor) -> None:
    module._parameters[name] = nn.Parameter(value.detach(), requires_grad=False)


class TreeExperts(nn.Module):
    """Compute the shards of a rank's experts, and sum in one tree.

    experts: those of the rank. groups: of the whole model's experts, those of the rank.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        experts: Share,
        groups: Sequence[Share],
        group: Collectives,
        *,
        is_by_expert: bool,
    ):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.experts, self.group, self.is_by_expert = experts, group, is_by_expert
        # The number of the group of each of the rank's experts.
        self.number_of = [n for n, share in enumerate(groups) for _ in range(share.width)]
        self.num_groups = len(groups)

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the results of all experts; `index_Tk` numbers those of the whole model."""
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        held_Tk = (index_Tk >= self.experts.begin) & (index_Tk < self.experts.end)
        own_Tk = torch.where(held_Tk, index_Tk - self.experts.begin, self.experts.width)
        sums = self._sums(rows_TH, own_Tk, weights_Tk.masked_fill(~held_Tk, 0))
        if self.is_by_expert:
            whole_STH = self.group.sum_in_pairs(torch.stack(sums))
            return add_in_pairs(whole_STH.unbind()).view(hidden.shape)
        return self.group.sum_in_pairs(add_in_pairs(sums)).view(hidden.shape)

    def _sums(self, rows_TH: Tensor, own_Tk: Tensor, weights_Tk: Tensor) -> list[Tensor]:
        """Return each shard's sum over the rank's experts, `[T, H]`."""
        packed = [part for part in self.parts if isinstance(part, PackedExperts)]
        if len(packed) < len(self.parts):  # not yet, when the cut model is compared
            return [part(rows_TH, own_Tk, weights_Tk) for part in self.parts]
        routes = _Routes(own_Tk, weights_Tk, self.experts.width)
        return [self._sum(rows_TH, routes, part) for part in packed]

    def _sum(self, rows_TH: Tensor, routes: _Routes, part: PackedExperts) -> Tensor:
        """Return one shard's sum: of each group from its first expert on, then in pairs of groups."""
        groups = [torch.zeros_like(rows_TH) for _ in range(self.num_groups)]
        for expert, tokens, scales in routes.of_experts:
            result = part.down[expert](part.gate(part.gate_up[expert](rows_TH[tokens])))
            group_TH = groups[self.number_of[expert]]
            group_TH.index_add_(0, tokens, (result * scales).to(group_TH.dtype))
        return add_in_pairs(groups)


class _Routes:
    """Hold the tokens of each expert that has some, and their weights, sorted once for all shards.

    of_experts: number, tokens, and weights of each.
    """

    def __init__(self, own_Tk: Tensor, weights_Tk: Tensor, experts: int):
        flat = own_Tk.reshape(-1)
        order = flat.argsort(stable=True)
        tokens, scales = order // own_Tk.shape[-1], weights_Tk.reshape(-1)[order].unsqueeze(1)
        counts = flat.bincount(minlength=experts).tolist()[:experts]
        self.of_experts: list[tuple[int, Tensor, Tensor]] = []
        start = 0
        for expert, count in enumerate(counts):
            part = slice(start, start + count)
            if count:
                self.of_experts.append((expert, tokens[part], scales[part]))
            start += count
