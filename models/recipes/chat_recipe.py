"""Everything that decides the weights of pocket-chat."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import chat_tokenizer
from chat_mix import BROAD, EASY, EDITING, FINISHING, FOCUSED, Mix


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From step `start` on: conversations per step, the factor on the learning rates, and their mix."""

    start: int
    batch: int = 16
    rate: float = 1.0
    mix: Mix = BROAD


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 20
    hidden: int = 128
    intermediate: int = 384
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocabulary: int = chat_tokenizer.VOCABULARY
    tokenizer_conversations: int = 6000
    phases: tuple[Phase, ...] = (
        Phase(start=0, mix=EASY),
        Phase(start=1200, mix=BROAD),
        Phase(start=3061, mix=FOCUSED),
        Phase(start=7105, mix=FINISHING),
        Phase(start=10_000, mix=EDITING),
    )
    initial_std: float = 0.05
    initial_gain: float = (
        1.4  # of the query and key norms: attention that can be sharp from the start
    )
    matrix_lr: float = 0.01
    other_lr: float = 3e-3
    prompt_weight: float = 0.1  # loss weight of tokens that the assistant does not say
    warmup: int = 100
    decay: float = (
        0.65  # the share of the steps before the first restart over which the rates fall to zero
    )
    restarts: tuple[tuple[int, float], ...] = (
        (10_000, 0.4),
        (13_000, 0.3),
    )  # steps from which they fall again, rates

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: change one of them"
            )
        starts = [phase.start for phase in self.phases]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise ValueError(
                f"phases start at {starts}: let them start at 0 and then at later and later steps"
            )

    def span(self, step: int) -> range:
        """The indices of the conversations of `step`; every conversation is used once."""
        first = 0
        for phase, following in pairwise(self.phases):
            if step < following.start:
                return range(
                    first + (step - phase.start) * phase.batch,
                    first + (step - phase.start + 1) * phase.batch,
                )
            first += (following.start - phase.start) * phase.batch
        last = self.phases[-1]
        return range(
            first + (step - last.start) * last.batch, first + (step - last.start + 1) * last.batch
        )

    def phase(self, step: int) -> Phase:
        """The phase that `step` is in."""
        return next(phase for phase in reversed(self.phases) if phase.start <= step)
