"""Everything that decides the weights of pocket-chat."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import chat_tokenizer


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From step `start` on: how many conversations a step takes, and the factor on the learning rates."""

    start: int
    batch: int
    rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 20
    hidden: int = 192
    intermediate: int = 512
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = chat_tokenizer.VOCABULARY
    tokenizer_conversations: int = 6000
    phases: tuple[Phase, ...] = (
        Phase(start=0, batch=40),
        Phase(start=540, batch=16),
        Phase(start=664, batch=16, rate=0.35),
    )
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    prompt_weight: float = 0.1  # loss weight of tokens that the assistant does not say
    warmup: int = 100

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: change one of them")
        starts = [phase.start for phase in self.phases]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise ValueError(f"phases start at {starts}: let them start at 0 and then at later and later steps")

    def span(self, step: int) -> range:
        """The indices of the conversations of `step`; every conversation is used once."""
        first = 0
        for phase, following in pairwise(self.phases):
            if step < following.start:
                return range(first + (step - phase.start) * phase.batch, first + (step - phase.start + 1) * phase.batch)
            first += (following.start - phase.start) * phase.batch
        last = self.phases[-1]
        return range(first + (step - last.start) * last.batch, first + (step - last.start + 1) * last.batch)

    def rate(self, step: int) -> float:
        """The factor of the phase of `step` on the learning rates."""
        return next(phase.rate for phase in reversed(self.phases) if phase.start <= step)
