"""Compute what one rank of a group holds of a model: the rank that needs the most memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from motet_shared.errors import ConfigError

from .model_shape import LayerCache, ModelShape, Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Hold the degrees of a group: ranks that share matrices, layers and experts.

    tensor and expert are equal if both are above 1: the same ranks share both.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def count(self) -> int:
        """Return the number of ranks."""
        return max(self.tensor, self.expert) * self.pipeline


def largest_share(shape: ModelShape, ranks: Ranks) -> ModelShape:
    """Return what the rank with the most parameters holds, as a model of its own.

    The first stage has the embeddings and the head besides its layers. Experts are divided by the
    larger of both degrees, latents of MLA and recurrent layers are whole on every rank of a stage.
    Raises ConfigError for more stages than layers, or heads that cannot be shared.
    """
    count = len(shape.layers)
    if ranks.pipeline > count:
        raise ConfigError(
            f"pipeline_parallel={ranks.pipeline}: the model has {count} layers; give at most that",
            param="pipeline_parallel",
        )
    bounds = [count * stage // ranks.pipeline for stage in range(ranks.pipeline + 1)]
    stages = [_stage(shape, ranks, first, end) for first, end in pairwise(bounds)]
    return max(stages, key=lambda stage: stage.parameters.total)


def _stage(shape: ModelShape, ranks: Ranks, first: int, end: int) -> ModelShape:
    whole, layers = shape.parameters, shape.layers[first:end]
    share = len(layers) / len(shape.layers)
    is_first, tied = not first, whole.tied and ranks.tensor == 1
    head = shape.vocab * shape.hidden if whole.tied else whole.lm_head
    experts = max(ranks.tensor, ranks.expert)
    own = Parameters(
        embeddings=whole.embeddings * is_first,
        attention=round(whole.attention * share / ranks.tensor),
        recurrent=round(whole.recurrent * share),
        mlp=round(whole.mlp * share / ranks.tensor),
        experts=round(whole.experts * share / experts),
        norms=round(whole.norms * share),
        lm_head=0 if tied else -(-head // ranks.tensor) * is_first,
        active_experts=round(whole.active_experts * share / experts),
        tied=tied and is_first,
    )
    matrices = _products(own, shape) / max(_products(whole, shape), 1)
    return replace(
        shape,
        layers=tuple(_cache(layer, ranks.tensor) for layer in layers),
        parameters=replace(
            own,
            matrices=round(whole.matrices * matrices),
            matrix_rows=round(whole.matrix_rows * matrices),
        ),
        widest=-(-shape.widest // ranks.tensor),
    )


def _products(counts: Parameters, shape: ModelShape) -> int:
    """Return about how many parameters are multiplied by."""
    head = shape.vocab * shape.hidden if counts.tied else counts.lm_head
    return counts.attention + counts.recurrent + counts.mlp + counts.experts + head


def _cache(layer: LayerCache, tensor: int) -> LayerCache:
    """Return the cache of a rank's key/value heads; several ranks hold one if there are fewer."""
    heads = layer.rows // 2
    if not heads or tensor == 1:
        return layer
    if heads % tensor and tensor % heads:
        raise ConfigError(
            f"tensor_parallel={tensor}: the model has {heads} key/value heads, which that many ranks"
            " cannot share equally; give a divisor or a multiple",
            param="tensor_parallel",
        )
    own = max(1, heads // tensor)
    return replace(
        layer,
        elements=layer.elements * own // heads,
        rows=2 * own,
        score_width=layer.score_width // tensor,
    )
