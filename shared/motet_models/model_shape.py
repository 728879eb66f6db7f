"""Describe a model for memory and speed: parameters by part, and the cache of each layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Describe the cache of one layer.

    elements: numbers per token: keys and values of all heads, or the latent of MLA. 0: no
        attention.
    rows: vectors per token that hold them: a key and a value of each head, or one latent.
    window: tokens that a query attends to, including itself; None: all.
    chunk: length of the chunks within which queries attend to tokens; None: no chunks.
    state: numbers of recurrent state per sequence, independent of its length, in float32.
    score_width: multiply-adds of attention per query and visible key.
    """

    elements: int = 0
    rows: int = 0
    window: int | None = None
    chunk: int | None = None
    state: int = 0
    score_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Count parameters by part.

    active_experts: those of `experts` that one token uses.
    matrices: elements of all weight matrices in products, including experts and lm_head (that of
        the embeddings if tied); matrix_rows: their output rows, each with its own scales if
        quantized.
    tied: the embeddings also serve as lm_head, counted once, under `embeddings`.
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
        """Return the number of all parameters."""
        parts = (
            self.embeddings,
            self.attention,
            self.recurrent,
            self.mlp,
            self.experts,
            self.norms,
            self.lm_head,
        )
        return sum(parts)

    @property
    def active(self) -> int:
        """Return the number of parameters that one token uses."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Describe a decoder as far as it determines memory and speed.

    expert_share: experts per token / experts; 1 without experts.
    widest: largest row of activations inside a layer, per token.
    context: longest sequence that the config allows; 0 if it gives no limit.
    """

    model_type: str
    layers: tuple[LayerCache, ...]
    parameters: Parameters
    hidden: int
    vocab: int
    widest: int
    expert_share: float = 1.0
    context: int = 0
