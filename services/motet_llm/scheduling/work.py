"""Describe what one request computes in a step."""

from __future__ import annotations

from dataclasses import dataclass

from motet_llm.engine.request import Request
from motet_llm.speculation.speculative_row import Row, SpeculativeRow


@dataclass(slots=True, frozen=True)
class Work:
    """Compute the next `num_tokens` tokens of `request`.

    If those are all its uncomputed tokens, draw the next one, unless the prompt is computed for
    another engine or for its scores alone.

    draft: tokens that may come next. They are computed too and counted in `num_tokens`; a token is
        drawn after each of them.
    """

    request: Request
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def draws(self) -> bool:
        """Return True if a token is drawn after the last computed one."""
        return (
            self.num_tokens - len(self.draft) == self.request.num_uncomputed
            and not self.request.constraints.prefill_only
            and not self.request.is_full
        )

    @property
    def rows(self) -> list[Row]:
        """Return the rows that draw tokens: the request, and a speculative row per draft token."""
        if not self.draws:
            return []
        return [
            self.request,
            *(SpeculativeRow(self.request, self.draft[:n]) for n in range(1, 1 + len(self.draft))),
        ]

    @property
    def tokens(self) -> list[int]:
        """Return the tokens to compute."""
        return [*self.request.tokens[slice(*self.span)], *self.draft]

    @property
    def span(self) -> tuple[int, int]:
        """Return the positions of the first token to compute and of the one after the last."""
        return self.request.num_computed, self.request.num_computed + self.num_tokens
