"""Define every number that decides the weights of pocket-chat."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from recipes.chat import tokenizer as chat_tokenizer
from recipes.chat.mix import BROAD, EASY, EDITING, FINISHING, FOCUSED, Mix
from recipes.training.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Define training from step `start` on: conversations per step, learning rate factor, mix."""

    start: int
    batch: int = 16
    rate: float = 1.0
    mix: Mix = BROAD


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define the model's sizes, its training data and its optimization."""

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
    initial_gain: float = 1.4  # of the query and key norms; lets attention be sharp from the start
    matrix_lr: float = 0.01
    other_lr: float = 3e-3
    prompt_weight: float = 0.1  # loss weight of tokens outside the assistant's replies
    warmup: int = 100
    decay: float = 0.65  # share of the steps before the first restart with decaying rates
    restarts: tuple[tuple[int, float], ...] = (
        (10_000, 0.4),
        (13_000, 0.3),
    )  # (step, factor): the rates decay again from this factor

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise RecipeError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: change one",
                param="heads",
            )
        starts = [phase.start for phase in self.phases]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise RecipeError(
                f"phases: they start at steps {starts}; the first must start at step 0 and each other"
                " one after the one before it",
                param="phases",
            )

    def span(self, step: int) -> range:
        """Return the indices of the conversations of `step`; each is used once."""
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
        """Return the phase of `step`."""
        return next(phase for phase in reversed(self.phases) if phase.start <= step)
