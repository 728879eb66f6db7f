"""Select heavy hitters: the keys and values of a prompt that its last tokens attend to the most.

The last tokens of a prompt are *watched*: their queries are kept, layer by layer, until the prompt
is computed. Then every key/value head keeps the tokens that receive the most of their attention,
and the watched tokens themselves. Attention is summed over the queries and over the heads that
share a key, and max-pooled over neighbouring tokens, so that a name is not split. What stays
depends on the prompt alone, not on how it was divided into chunks.

SnapKV: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024; the name is
that of H2O: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", 2023. They select per query head; here, heads that share a key select together,
because they share the memory.

Shapes: Q watched tokens, K key/value heads, G query heads that share one, T tokens of the prompt, J
that stay, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from motet_shared.errors import ConfigError

if TYPE_CHECKING:
    from motet_llm.cache.kv_cache import KvCache, LayerShape
    from motet_llm.cache.state_cache import StateShape

    from .options import AttentionOptions

POOL = 7  # tokens of the max-pooling window


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """Define the rule for longer prompts: keep `kept` tokens, chosen by the last `watched` ones.

    SnapKV's selection: score(t) = Σ over watched queries and the heads that share a key of
    softmax(q·kᵀ)[t], max-pooled over POOL neighbours; the largest scores stay.
    """

    kept: int
    watched: int

    def watch(self, num_prompt: int) -> Watch | None:
        """Return the watch over a prompt of `num_prompt` tokens; None if all of them stay."""
        return Watch(self, num_prompt) if num_prompt > self.kept else None

    def check(self, layers: Mapping[int, LayerShape], states: Mapping[int, StateShape]) -> None:
        """Raise ConfigError for a model whose layers do not keep keys and values of all tokens."""
        setting = f"attention_budget={self.kept}"
        if states:
            raise ConfigError(
                f"{setting}: layer {min(states)} has a recurrent state, of which no token can be left out"
            )
        if latent := [layer for layer, shape in layers.items() if not shape.value_dim]:
            raise ConfigError(
                f"{setting}: layer {latent[0]} keeps latents (MLA), which its heads share; leave it at 0"
            )
        if all(shape.window or shape.chunk for shape in layers.values()):
            raise ConfigError(
                f"{setting}: every layer has a window, and forgets by itself; leave it at 0"
            )


@dataclass(slots=True)
class _Queries:
    """Hold the queries of a layer, piece by piece, and how it computes scores."""

    scale: float
    options: AttentionOptions
    pieces: list[Tensor] = field(default_factory=list)


class Watch:
    """Record the queries at the end of one prompt of `num_prompt` tokens, from `start` on."""

    def __init__(self, rule: HeavyHitters, num_prompt: int):
        self.kept, self.num_prompt = rule.kept, num_prompt
        self.start = num_prompt - rule.watched
        self._queries: dict[int, _Queries] = {}

    @property
    def num_left_out(self) -> int:
        return self.num_prompt - self.kept

    def among(self, span: tuple[int, int]) -> range:
        """Return the watched tokens within a span, counted from its beginning."""
        start, stop = span
        return range(max(0, self.start - start), max(0, min(stop, self.num_prompt) - start))

    def note(self, layer: int, query_NHD: Tensor, scale: float, options: AttentionOptions) -> None:
        """Copy the queries of the next watched tokens, after those of earlier calls."""
        self._queries.setdefault(layer, _Queries(scale, options)).pieces.append(query_NHD.clone())

    def heaviest(self, layer: int, kv: KvCache, slots_T: Tensor) -> Tensor:
        """Return positions `[K, J]`, in order, that each head of a layer keeps.

        slots_T: the slots of the whole prompt.
        """
        queries = self._queries[layer]
        query_QHD = torch.cat(queries.pieces).float()
        heads = kv.layer(layer)[0].shape[1]
        query_KGQD = query_QHD.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        sinks_KG = (
            None
            if queries.options.sinks_H is None
            else queries.options.sinks_H.float().unflatten(0, (heads, -1))
        )
        watched = torch.arange(self.start, self.num_prompt, device=slots_T.device)
        rows = []
        for head in range(heads):
            weight_T = attention(
                query_KGQD[head],
                kv.keys(layer, head, slots_T),
                queries.scale,
                softcap=queries.options.softcap,
                sinks_G=None if sinks_KG is None else sinks_KG[head],
            ).sum((0, 1))[: self.start]
            rows.append(torch.cat((top(weight_T, self.kept - len(watched)), watched)))
        return torch.stack(rows)

    def clear(self) -> None:
        """Drop the queries: the prompt was compressed, or is computed again."""
        self._queries = {}


def attention(
    query_GQD: Tensor,
    key_TD: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    sinks_G: Tensor | None = None,
) -> Tensor:
    """Return attention weights `[G, Q, T]` of the last Q of T tokens, in float32."""
    score_GQT = query_GQD @ key_TD.T * scale
    if softcap is not None:
        score_GQT = softcap * torch.tanh(score_GQT / softcap)
    num_queries, num_keys = score_GQT.shape[1:]
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=key_TD.device).triu(
        num_keys - num_queries + 1
    )
    score_GQT = score_GQT.masked_fill(later, -torch.inf)
    if sinks_G is None:
        return score_GQT.softmax(-1)
    sinks_GQ1 = sinks_G[:, None, None].expand(-1, num_queries, 1)
    return torch.cat((score_GQT, sinks_GQ1), -1).softmax(-1)[..., :-1]


def top(weight_T: Tensor, count: int) -> Tensor:
    """Return, in order, the positions of the `count` tokens with the largest pooled weight.

    Of equal weights the first positions are taken.
    """
    pooled_T = max_pool1d(weight_T[None], POOL, stride=1, padding=POOL // 2)[0]
    return pooled_T.sort(descending=True, stable=True).indices[:count].sort().values
