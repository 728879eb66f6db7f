"""Represent a request in a drafter: drafting never changes the request itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from motet_llm.engine.request import Request, with_tokens


class DraftRequest(Request):
    """Represent a request with draft tokens at its end, perhaps with blocks of another cache.

    target: the request of the target model. num_known: how many of its tokens are confirmed by the
    target. draft: the tokens behind them.
    wanted: how many draft tokens are wanted.
    """

    __slots__ = ("draft", "num_known", "target", "wanted")

    def __init__(self, target: Request):
        options: dict[str, Any] = {
            "max_length": target.max_length,
            "stop_ids": target.stop_ids,
            "output": target.output,
        }
        super().__init__(
            target.key,
            target.arrival,
            target.tokens[: target.num_prompt],
            target.sampling,
            **options,
        )
        self.target = target
        self.num_known = 0
        self.draft: list[int] = []
        self.wanted = 0

    @property
    def confirmed(self) -> list[int]:
        """Return the confirmed tokens that this request is to hold."""
        return self.target.tokens

    @property
    def num_confirmed(self) -> int:
        """Return the number of confirmed tokens, without copying them."""
        return len(self.target.tokens)

    @property
    def distinct(self) -> np.ndarray:
        """Return the distinct tokens, ascending; the draft's are dropped with it."""
        return with_tokens(self.target.distinct, self.draft)

    def synchronize(self, wanted: int) -> None:
        """Synchronize with the target and drop the draft.

        The tokens computed so far stay computed up to the first one that differs.
        """
        confirmed, tokens, same = self.confirmed, self.tokens, self.num_known
        while same < min(len(tokens), len(confirmed)) and tokens[same] == confirmed[same]:
            same += 1
        tokens[same:] = confirmed[same:]
        self.num_known = len(confirmed)
        self.num_computed = min(self.num_computed, same, self.num_known - 1)
        self.grammar_state = (
            None if self.target.grammar_state is None else self.target.grammar_state.copy()
        )
        self.draft, self.wanted = [], wanted

    def extend(self, token: int) -> bool:
        """Append a token to the draft; return True if the draft continues.

        A stop token is not appended: nothing follows the end of a reply.
        """
        if token in self.stop_ids:
            return False
        self.append(token)
        self.draft.append(token)
        if self.grammar_state is not None:
            self.grammar_state.accept([token])
        return len(self.draft) < self.wanted and self.end is None
