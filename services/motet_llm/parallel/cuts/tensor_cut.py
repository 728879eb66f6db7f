"""Cut a loaded model's matrices: each rank keeps its rows or columns of them, as the plan says.

Queries, keys and values are cut by heads. Where there are fewer key/value heads than ranks, several
ranks hold the same one. Matrices keep the checkpoint's memory until they are packed: a cut is a
view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_llm.attention.latent import LatentHeads
from motet_llm.parallel.collectives import Collectives
from motet_shared.errors import ConfigError

from .cut_modules import GatheredLinear
from .plan import Plan, number_of
from .shares import Share, divide, evenly, key_heads
from .sums import Sums

_KEYS = ("k_proj", "v_proj")
_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "num_q_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


@dataclass(frozen=True, slots=True)
class Heads:
    """Hold the heads of an attention module, and those of one rank."""

    queries: int
    keys: int
    own_queries: Share
    own_keys: Share


class TensorCut:
    """Cut one model for the rank at `group.rank`, in place; sums: how products are summed."""

    def __init__(self, model: PreTrainedModel, plan: Plan, group: Collectives, sums: Sums):
        self._model, self._plan, self._group, self._sums = model, plan, group, sums
        self._place, self._ranks = group.rank, group.size
        # The rows and the columns of each cut matrix that are the rank's, by its name.
        self.ranges: dict[str, tuple[list[Share] | None, list[Share] | None]] = {}

    def run(self) -> None:
        """Cut all modules that the plan names, and the head. Raises ConfigError by name."""
        for path, parent in list(self._model.named_modules()):
            styles = self._styles(path, parent)
            if not styles:
                continue
            heads = self._heads(path, parent, styles)
            for name, style in styles.items():
                self._cut(path, parent, name, style, heads)
            if heads is not None:
                _set_numbers(parent, heads)
        self._cut_head()

    def _styles(self, path: str, parent: nn.Module) -> dict[str, str]:
        """Return the styles of a module's own children and parameters."""
        names = [*dict(parent.named_children()), *dict(parent.named_parameters(recurse=False))]
        found = ((name, self._plan.of(f"{path}.{name}" if path else name)) for name in names)
        return {name: style for name, style in found if style is not None}

    def _heads(self, path: str, parent: nn.Module, styles: dict[str, str]) -> Heads | None:
        """Return the heads of an attention module that is cut by them; None for another module."""
        latent = next(
            (child for child in parent.children() if isinstance(child, LatentHeads)), None
        )
        if latent is not None:
            return self._shared(path, len(latent.key_HRD), len(latent.key_HRD))
        if not {"q_proj", "k_proj", "query_key_value"} & {
            name for name, style in styles.items() if style == "colwise"
        }:
            return None
        queries = number_of(parent, _QUERIES)
        keys = self._key_heads(parent) if hasattr(parent, "k_proj") else queries
        if queries is None or keys is None:
            raise self._refusal(f"{path} does not say how many heads it has")
        if (groups := getattr(parent, "num_key_value_groups", None)) and hasattr(parent, "k_proj"):
            queries = keys * int(groups)
        return self._shared(path, queries, keys)

    def _key_heads(self, parent: Any) -> int | None:
        dim = getattr(parent, "head_dim", None)
        if isinstance(dim, int) and not parent.k_proj.out_features % dim:
            return int(parent.k_proj.out_features // dim)
        return number_of(parent, _KEY_HEADS)

    def _shared(self, path: str, queries: int, keys: int) -> Heads:
        if queries % self._ranks or (keys % self._ranks and self._ranks % keys):
            raise self._refusal(
                f"{path} has {queries} query and {keys} key/value heads, which {self._ranks} ranks"
                " cannot share equally"
            )
        return Heads(
            queries,
            keys,
            evenly(queries, self._place, self._ranks),
            key_heads(keys, self._place, self._ranks),
        )

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"tensor_parallel={self._ranks}: model_type={self._model.config.model_type!r}:"
            f" {reason}; give another degree, or pipeline_parallel",
            param="tensor_parallel",
        )

    def _cut(
        self, path: str, parent: nn.Module, name: str, style: str, heads: Heads | None
    ) -> None:
        child = getattr(parent, name)
        full = f"{path}.{name}"
        if isinstance(child, nn.Parameter):
            self._cut_parameter(parent, name, style, heads)
        elif isinstance(child, LatentHeads):
            self._cut_latent(child)
        elif type(child) is nn.Linear:
            setattr(parent, name, self._linear(full, name, child, style, heads))
        elif style in ("moe_tp_experts", "all_reduce"):
            setattr(parent, name, self._sums.experts(child))
        else:
            raise self._refusal(f"{full} is a {type(child).__name__}, no plain matrix ({style})")

    # ------------------------------------------------------------------------------------ matrices
    def _linear(
        self, full: str, name: str, linear: nn.Linear, style: str, heads: Heads | None
    ) -> nn.Module:
        if style == "colwise":
            own = self._rows_of(name, linear.out_features, heads)
            self._keep_rows(full, linear, own)
            return linear
        if style == "colwise_gather_output":
            return self._gathered(full, linear, is_for_first=False)
        if style == "rowwise":
            return self._summed(full, linear, heads, splits_input=False)
        if style == "rowwise_split_input":
            return self._summed(full, linear, None, splits_input=True)
        if style == "packed_colwise":
            linear.weight.data = self._halves(linear.weight.data, 0)
            if linear.bias is not None:
                linear.bias.data = self._halves(linear.bias.data, 0)
            half = linear.out_features // 2
            own = self._sums.divide(half)
            self.ranges[full] = ([own, Share(half + own.begin, half + own.end)], None)
            linear.out_features = len(linear.weight)
            return linear
        raise self._refusal(f"{full} is cut in an unknown way ({style})")

    def _rows_of(self, name: str, rows: int, heads: Heads | None) -> Share:
        """Return the rank's output features of a matrix."""
        if heads is None or name not in _KEYS:
            return self._evenly_or_divided(rows, heads)
        size = rows // heads.keys
        return Share(heads.own_keys.begin * size, heads.own_keys.end * size)

    def _evenly_or_divided(self, size: int, heads: Heads | None) -> Share:
        if heads is None:
            return self._sums.divide(size)
        if size % heads.queries:
            raise self._refusal(f"{size} features do not belong to {heads.queries} heads")
        return evenly(size, self._place, self._ranks)

    def _keep_rows(self, full: str, linear: nn.Linear, own: Share) -> None:
        linear.weight.data = linear.weight.data[own.begin : own.end]
        if linear.bias is not None:
            linear.bias.data = linear.bias.data[own.begin : own.end]
        linear.out_features = own.width
        self.ranges[full] = ([own], None)

    def _summed(
        self, full: str, linear: nn.Linear, heads: Heads | None, *, splits_input: bool
    ) -> nn.Module:
        """Return a module that sums the products of the ranks' input features."""
        own = self._evenly_or_divided(linear.in_features, heads)
        self.ranges[full] = (None, [own])
        by_heads = heads is not None
        summed = self._sums.linear(linear, own, heads=by_heads, splits_input=splits_input)
        for name, share in self._sums.parts(summed).items():
            self.ranges[f"{full}.{name}"] = (None, [share])
        return summed

    def _gathered(self, full: str, linear: nn.Linear, *, is_for_first: bool) -> GatheredLinear:
        size = linear.out_features
        widths = [divide(size, place, self._ranks).width for place in range(self._ranks)]
        self._keep_rows(full, linear, divide(size, self._place, self._ranks))
        return GatheredLinear(linear, self._group, widths, is_for_first=is_for_first)

    def _halves(self, whole: Tensor, axis: int) -> Tensor:
        """Return the rank's features of gate and up, which lie one after the other on an axis."""
        gate, up = whole.chunk(2, dim=axis)
        own = self._sums.divide(gate.shape[axis])
        parts = (half.narrow(axis, own.begin, own.width) for half in (gate, up))
        return torch.cat(list(parts), dim=axis)

    def _cut_head(self) -> None:
        """Cut the head by tokens of the vocabulary, if it is a plain matrix of its own."""
        head = self._model.get_output_embeddings()
        names = [name for name, module in self._model.named_modules() if module is head]
        if type(head) is nn.Linear and names and "." not in names[0]:
            own = self._gathered(names[0], _untied(head), is_for_first=True)
            setattr(self._model, names[0], own)

    # ---------------------------------------------------------------------------------- parameters
    def _cut_parameter(self, parent: Any, name: str, style: str, heads: Heads | None) -> None:
        whole = getattr(parent, name).data
        if whole.dim() == 3:
            self._cut_stack(parent, name, style)
        elif style == "colwise" and whole.dim() == 1:
            own = self._evenly_or_divided(len(whole), heads)
            getattr(parent, name).data = whole[own.begin : own.end]
        else:
            raise self._refusal(f"{name} of shape {list(whole.shape)} ({style})")

    def _cut_stack(self, experts: Any, name: str, style: str) -> None:
        """Cut the matrices of all experts, and their biases."""
        parameter, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        axis = -2 if style in ("colwise", "packed_colwise") else -1
        is_packed = style.startswith("packed") and getattr(experts, "is_concatenated", True)
        cut: Callable[[Tensor, int], Tensor] = self._halves if is_packed else self._narrow
        parameter.data = cut(parameter.data, axis)
        if bias is None:
            return
        if name == "down_proj":
            bias.data = bias.data * (self._place == 0)
        else:
            bias.data = cut(bias.data, -1)

    def _narrow(self, whole: Tensor, axis: int) -> Tensor:
        own = self._sums.divide(whole.shape[axis])
        return whole.narrow(axis, own.begin, own.width)

    def _cut_latent(self, heads: LatentHeads) -> None:
        own = evenly(len(heads.key_HRD), self._place, self._ranks)
        heads.key_HRD = heads.key_HRD[own.begin : own.end]
        heads.value_HVR = heads.value_HVR[own.begin : own.end]


def _untied(head: nn.Linear) -> nn.Linear:
    """Return the head with a parameter of its own: the embedding of a tied one stays whole."""
    own = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
    own.weight = nn.Parameter(head.weight.data, requires_grad=False)
    if head.bias is not None:
        own.bias = nn.Parameter(head.bias.data, requires_grad=False)
    return own


def _set_numbers(attention: nn.Module, heads: Heads) -> None:
    """Tell a module's code how many heads its rank has."""
    for names, own in ((_QUERIES, heads.own_queries), (_KEY_HEADS, heads.own_keys)):
        for name in names:
            if isinstance(vars(attention).get(name), int):
                setattr(attention, name, own.width)
