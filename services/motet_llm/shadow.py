"""A request as those who guess know it: what they compute for it, and guess, leaves no trace in the request itself."""

from __future__ import annotations

from typing import Any

from .request import Request


class Shadow(Request):
    """A request, perhaps with blocks of another cache, and with guesses at its end.

    known: of its tokens, how many are the request's for certain. draft: the others; wanted: how many are to be there.
    """

    __slots__ = ("draft", "known", "real", "wanted")

    def __init__(self, real: Request):
        options: dict[str, Any] = {"max_length": real.max_length, "stop_ids": real.stop_ids, "output": real.output}
        super().__init__(real.key, real.arrival, real.tokens[: real.num_prompt], real.sampling, **options)
        self.real = real
        self.known = 0
        self.draft: list[int] = []
        self.wanted = 0

    @property
    def theirs(self) -> list[int]:
        """What the request says its tokens are."""
        return self.real.tokens

    @property
    def num_theirs(self) -> int:
        """How many these are, without a copy of them."""
        return len(self.real.tokens)

    def follow(self, wanted: int) -> None:
        """Become what the request is now. What is computed of tokens that it has stays."""
        theirs, ours, same = self.theirs, self.tokens, self.known
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        ours[same:] = theirs[same:]
        self.known = len(theirs)
        self.num_computed = min(self.num_computed, same, self.known - 1)
        self.sentence = None if self.real.sentence is None else self.real.sentence.copy()
        self.draft, self.wanted = [], wanted

    def guess(self, token: int) -> bool:
        """Add a token to the draft; whether it is to go on. Nothing follows one that ends the answer."""
        if token in self.stop_ids:
            return False
        self.append(token)
        self.draft.append(token)
        if self.sentence is not None:
            self.sentence.accept([token])
        return len(self.draft) < self.wanted and self.end is None
