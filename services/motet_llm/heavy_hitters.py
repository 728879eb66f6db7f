"""Heavy hitters: which keys and values of a prompt stay when it is cut down to what its end attends to.

The last tokens of a prompt are *watched*: their queries are kept, layer by layer, until the prompt is computed. Then
every key/value head keeps the tokens that they give the most of their attention, and the watched tokens themselves.
Attention is summed over the queries and over the heads that share a key, and widened to the neighbours of what it falls
on, so that a name is not torn apart. What stays depends on the prompt alone: not on how it was cut into steps.

(SnapKV: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024; the name is that of H2O: Zhang
et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023. Theirs is a choice
per query head; heads that share a key choose together here, for they share the memory.)

Shapes: Q watched tokens, K key/value heads, G query heads that share one, T tokens of the prompt, J that stay, D head
dimension.
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
    from .attention import AttentionOptions
    from .kv_cache import KvCache, LayerShape
    from .state_cache import StateShape

POOL = 7  # tokens over which the largest attention counts


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """Of a longer prompt, so many tokens are `kept`; its last `watched` ones are among them, and choose the others."""

    kept: int
    watched: int

    def watch(self, num_prompt: int) -> Watch | None:
        """Over a prompt of so many tokens; None if all of them stay."""
        return Watch(self, num_prompt) if num_prompt > self.kept else None

    def check(self, layers: Mapping[int, LayerShape], states: Mapping[int, StateShape]) -> None:
        """Raise ConfigError for a model whose layers do not keep a key and a value of every token."""
        told = f"attention_budget={self.kept}"
        if states:
            raise ConfigError(f"{told}: layer {min(states)} has a recurrent state, of which no token can be left out")
        if latent := [layer for layer, shape in layers.items() if not shape.value_dim]:
            raise ConfigError(f"{told}: layer {latent[0]} keeps latents (MLA), which its heads share; leave it at 0")
        if all(shape.window is not None for shape in layers.values()):
            raise ConfigError(f"{told}: every layer has a sliding window, and forgets by itself; leave it at 0")


@dataclass(slots=True)
class _Asked:
    """The queries of a layer, piece by piece, and how it makes scores of them."""

    scale: float
    options: AttentionOptions
    pieces: list[Tensor] = field(default_factory=list)


class Watch:
    """The end of one prompt of `num_prompt` tokens, from `start` on."""

    def __init__(self, rule: HeavyHitters, num_prompt: int):
        self.kept, self.num_prompt = rule.kept, num_prompt
        self.start = num_prompt - rule.watched
        self._asked: dict[int, _Asked] = {}

    @property
    def num_left_out(self) -> int:
        return self.num_prompt - self.kept

    def among(self, span: tuple[int, int]) -> range:
        """The watched tokens among those of a span, counted from its beginning."""
        start, stop = span
        return range(max(0, self.start - start), max(0, min(stop, self.num_prompt) - start))

    def note(self, layer: int, query_NHD: Tensor, scale: float, options: AttentionOptions) -> None:
        """Queries of the watched tokens behind those that were noted before. They are copied."""
        self._asked.setdefault(layer, _Asked(scale, options)).pieces.append(query_NHD.clone())

    def heaviest(self, layer: int, kv: KvCache, slots_T: Tensor) -> Tensor:
        """Positions `[K, J]`, in order, of what each head of a layer keeps. `slots_T`: where the whole prompt lies."""
        asked = self._asked[layer]
        query_QHD = torch.cat(asked.pieces).float()
        heads = kv.layer(layer)[0].shape[1]
        query_KGQD = query_QHD.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        sinks_KG = None if asked.options.sinks_H is None else asked.options.sinks_H.float().unflatten(0, (heads, -1))
        watched = torch.arange(self.start, self.num_prompt, device=slots_T.device)
        rows = []
        for head in range(heads):
            weight_T = attention(
                query_KGQD[head],
                kv.keys(layer, head, slots_T),
                asked.scale,
                softcap=asked.options.softcap,
                sinks_G=None if sinks_KG is None else sinks_KG[head],
            ).sum((0, 1))[: self.start]
            rows.append(torch.cat((top(weight_T, self.kept - len(watched)), watched)))
        return torch.stack(rows)

    def clear(self) -> None:
        """Forget the queries: the prompt has been cut, or is computed again."""
        self._asked = {}


def attention(
    query_GQD: Tensor, key_TD: Tensor, scale: float, *, softcap: float | None = None, sinks_G: Tensor | None = None
) -> Tensor:
    """`[G, Q, T]`: how the attention of the last Q of T tokens is shared out, in float32."""
    score_GQT = query_GQD @ key_TD.T * scale
    if softcap is not None:
        score_GQT = softcap * torch.tanh(score_GQT / softcap)
    num_queries, num_keys = score_GQT.shape[1:]
    later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=key_TD.device).triu(num_keys - num_queries + 1)
    score_GQT = score_GQT.masked_fill(later, -torch.inf)
    if sinks_G is None:
        return score_GQT.softmax(-1)
    sinks_GQ1 = sinks_G[:, None, None].expand(-1, num_queries, 1)
    return torch.cat((score_GQT, sinks_GQ1), -1).softmax(-1)[..., :-1]


def top(weight_T: Tensor, count: int) -> Tensor:
    """Positions, in order, of the `count` tokens around which the most weight lies; of equals those that come first."""
    around_T = max_pool1d(weight_T[None], POOL, stride=1, padding=POOL // 2)[0]
    return around_T.sort(descending=True, stable=True).indices[:count].sort().values
