"""What a model is made of, as far as memory and speed are concerned: parameters by part, and what each layer caches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What one layer keeps.

    elements: numbers per token: keys and values of all heads, or the latent of MLA. 0: no attention.
    rows: what they lie in: a key and a value of each head, or the latent.
    window: tokens that a query sees, itself included; None: all.
    state: numbers per sequence, whatever its length: recurrent state, in float32.
    score_width: multiply-adds of attention per query and key it sees.
    """

    elements: int = 0
    rows: int = 0
    window: int | None = None
    state: int = 0
    score_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How many there are, by part. `active_experts`: those of `experts` that one token passes through.

    matrices: elements of weight matrices that a product uses, experts and lm_head included (of a tied one the
        embeddings); matrix_rows: their output rows, each with scales of its own where weights are quantized.
    tied: the embeddings are the lm_head too, counted once, under `embeddings`.
    """

    embeddings: int = 0
    attention: int = 0
    recurrent: int = 0
    mlp: int = 0
    experts: int = 0
    norms: int = 0
    lm_head: int = 0
    active_experts: int = 0
    matrices: int = 0
    matrix_rows: int = 0
    tied: bool = False

    @property
    def total(self) -> int:
        parts = (self.embeddings, self.attention, self.recurrent, self.mlp, self.experts, self.norms, self.lm_head)
        return sum(parts)

    @property
    def active(self) -> int:
        """Parameters that one token passes through."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder, as far as memory and speed are concerned.

    expert_share: experts per token / experts; 1 without experts.
    widest: largest row of activations inside a layer, per token.
    context: longest sequence that the config allows; 0: it names no limit.
    """

    model_type: str
    layers: tuple[LayerCache, ...]
    parameters: Parameters
    hidden: int
    vocab: int
    widest: int
    expert_share: float = 1.0
    context: int = 0
