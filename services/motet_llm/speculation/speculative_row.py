"""Represent a row that computes a draft token, with the request as it would be there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from motet_llm.engine.request import Request, with_tokens
from motet_shared.messages import Sampling

if TYPE_CHECKING:
    from motet_llm.grammar.grammar import GrammarState


class SpeculativeRow:
    """Represent `request` with the draft tokens `ahead` appended.

    It reads the request's state, so it is valid for one step only.
    """

    __slots__ = ("ahead", "request")

    def __init__(self, request: Request, ahead: tuple[int, ...]):
        self.request = request
        self.ahead = ahead

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.request.stop_ids

    @property
    def grammar_state(self) -> GrammarState | None:
        """Return the grammar state of the request itself, which has not accepted `ahead`."""
        return self.request.grammar_state

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.ahead]

    @property
    def distinct(self) -> np.ndarray:
        """Return the distinct tokens, ascending."""
        return with_tokens(self.request.distinct, self.ahead)

    @property
    def output(self) -> list[int]:
        return [*self.request.output, *self.ahead]

    @property
    def num_output(self) -> int:
        return self.request.num_output + len(self.ahead)


Row = Request | SpeculativeRow  # one row of logits
