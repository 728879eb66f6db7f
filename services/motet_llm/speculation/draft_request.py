"""Represent a request in a drafter: drafting never changes the request itself."""

from __future__ import annotations

from typing import Any

from motet_llm.engine.request import Request


class DraftRequest(Request):
    """Represent a request with draft tokens at its end, perhaps with blocks of another cache.

    known: how many of its tokens are confirmed by the real request. draft: the tokens behind them.
    wanted: how many draft tokens are wanted.
    """

    __slots__ = ("draft", "known", "real", "wanted")

    def __init__(self, real: Request):
        options: dict[str, Any] = {
            "max_length": real.max_length,
            "stop_ids": real.stop_ids,
            "output": real.output,
        }
        super().__init__(
            real.key, real.arrival, real.tokens[: real.num_prompt], real.sampling, **options
        )
        self.real = real
        self.known = 0
        self.draft: list[int] = []
        self.wanted = 0

    @property
    def theirs(self) -> list[int]:
        """Return the confirmed tokens that this request is to hold."""
        return self.real.tokens

    @property
    def num_theirs(self) -> int:
        """Return the number of confirmed tokens, without copying them."""
        return len(self.real.tokens)

    def follow(self, wanted: int) -> None:
        """Synchronize with the real request and drop the draft.

        The tokens computed so far stay computed up to the first one that differs.
        """
        theirs, ours, same = self.theirs, self.tokens, self.known
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        ours[same:] = theirs[same:]
        self.known = len(theirs)
        self.num_computed = min(self.num_computed, same, self.known - 1)
        self.grammar_state = (
            None if self.real.grammar_state is None else self.real.grammar_state.copy()
        )
        self.draft, self.wanted = [], wanted

    def guess(self, token: int) -> bool:
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
