"""Sum over a fixed number of virtual shards in one tree: the same bits at every degree.

The setting `deterministic` cuts each summed matrix into as many shards whatever the number of ranks
is, one included. A rank computes the products of its shards one by one and adds them in pairs; the
ranks' sums, which are subtrees, are added in pairs again. So every number is the sum of the same
products in the same order.

Experts are cut by `tree_experts.py`. A model whose sums cannot be cut so (heads that two shards
cannot share, experts of a structure of their own, no plan) has no such tree: one rank computes it
as before, and a group is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from motet_llm.parallel.collectives import Collectives, add_in_pairs
from motet_shared.errors import ConfigError

from . import tree_experts
from .plan import WHOLE
from .shares import Share, divide, evenly
from .sums import columns_of

_SHARDS = (4, 2)  # numbers of virtual shards; a model has the first that suits its heads
# Styles of plans whose sums are those of plain matrices.
_CUT = {
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "packed_colwise",
    "embedding_rowwise",
}
# Styles of plans for the parameters of experts, besides those of matrices.
_EXPERTS = {*tree_experts.STYLES, "packed_rowwise", "grouped_gemm"}


def shards_of(config: PreTrainedConfig) -> int:
    """Return the number of a model's virtual shards, the same at every degree; 0: it has no tree."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    has_plan = bool(plan or getattr(config, "base_model_ep_plan", None))
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if (
        not has_plan
        or not set(plan.values()) <= _CUT | _EXPERTS | WHOLE
        or not isinstance(heads, int)
    ):
        return 0
    return next((shards for shards in _SHARDS if not heads % shards), 0)


def problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the settings with which a group cannot be deterministic, each with the remedy."""
    for name in ("tensor_parallel", "expert_parallel"):
        if _SHARDS[0] % getattr(config, name):
            yield name, "give 1, 2 or 4 ranks, among which 4 shards are divided"


def serves_alone(config: Any) -> bool:
    """Return True if the settings let one rank compute as a deterministic group does."""
    return bool(config.deterministic and config.device == "cpu" and config.stage == "thinker")


def refusal(field: str, ranks: int, shards: int) -> ConfigError:
    """Return the error of ranks that cannot share a model's shards; field: the setting."""
    return ConfigError(
        f"{field}={ranks}: deterministic=true: the sums of this model are cut into {shards or 1}"
        " shards, which that many ranks cannot share; give another degree, or leave deterministic"
        " off",
        param=field,
    )


class FixedTree:
    """Sum the shards of a rank, and the ranks' sums, in one tree.

    shards: of `shards_of`, among which the ranks of `group` divide them.
    """

    def __init__(self, group: Collectives, shards: int):
        self._group, self._shards = group, shards
        if not shards or shards % group.size:
            raise refusal("tensor_parallel", group.size, shards)
        each = shards // group.size
        self._own = range(group.rank * each, (group.rank + 1) * each)

    def divide(self, size: int) -> Share:
        own = [divide(size, shard, self._shards) for shard in self._own]
        return Share(own[0].begin, own[-1].end)

    def linear(
        self, linear: nn.Linear, own: Share, *, heads: bool, splits_input: bool
    ) -> nn.Module:
        cut = evenly if heads else divide
        shares = [cut(linear.in_features, shard, self._shards) for shard in self._own]
        if shares[0].begin != own.begin or shares[-1].end != own.end:
            raise ConfigError(
                f"deterministic=true: {linear.in_features} features do not belong to"
                f" {self._shards} shards; leave it off, or give one rank"
            )
        parts = [
            columns_of(linear, share, bias=shard == 0)
            for shard, share in zip(self._own, shares, strict=True)
        ]
        first = 0 if splits_input else own.begin
        within = [Share(share.begin - first, share.end - first) for share in shares]
        return TreeLinear(parts, within, self._group, shares)

    def parts(self, module: nn.Module) -> dict[str, Share]:
        assert isinstance(module, TreeLinear)
        return {f"parts.{number}": share for number, share in enumerate(module.columns)}

    def experts(self, experts: nn.Module) -> nn.Module:
        if isinstance(experts, tree_experts.TreeExperts):  # cut before
            return experts
        raise ConfigError(
            f"deterministic=true: {type(experts).__name__} is not summed in a fixed tree; leave it"
            " off, or give one rank"
        )


class TreeLinear(nn.Module):
    """Multiply each shard's columns by its inputs, and sum in one tree.

    shares: each part's features among the inputs. columns: among those of the whole matrix.
    """

    def __init__(
        self,
        parts: Sequence[nn.Linear],
        shares: Sequence[Share],
        group: Collectives,
        columns: Sequence[Share],
    ):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.shares, self.group, self.columns = shares, group, columns

    @property
    def summed(self) -> nn.Module:
        """Return one of what is summed over the ranks, for fused layers: a packed matrix."""
        return self.parts[0]

    @property
    def format(self) -> str:
        """Return the format of the packed matrices."""
        return str(self.parts[0].format)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the whole product `[..., N]`; the residual is added last."""
        own = [
            part(x[..., share.begin : share.end])
            for part, share in zip(self.parts, self.shares, strict=True)
        ]
        total = self.group.sum_in_pairs(add_in_pairs(own))
        return total if residual is None else total + residual
