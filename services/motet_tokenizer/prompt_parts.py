"""Cut the log-probabilities of a prompt into parts that are the same in every attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from motet_shared.errors import BadRequest, StreamBroken
from motet_shared.messages import PromptLogprob, PromptPiece, PromptScores, ScoredToken

PART = 256  # tokens of a part
MAX_ENTRIES = 1 << 18  # log-probabilities of a prompt: its tokens times (alternatives + 1)


def check_entries(num_prompt: int, alternatives: int) -> None:
    """Raise BadRequest if a prompt has more log-probabilities than one reply may hold."""
    most = MAX_ENTRIES // (alternatives + 1)
    if num_prompt > most:
        raise BadRequest(
            f"prompt_logprobs: a prompt of {num_prompt} tokens with {alternatives} alternatives each; "
            f"give at most {most} tokens, or fewer alternatives",
            param="prompt_logprobs",
        )


class PromptParts:
    """Collect the scores of one prompt, whose first token has none.

    Decode sends them in order; after a move it begins again, and what is known is skipped. spell:
    gives the bytes of a token.
    """

    def __init__(self, prompt: list[int], spell: Callable[[int], bytes]):
        self._prompt = prompt
        self._spell = spell
        self._known = [PromptLogprob(spell(prompt[0]), None)]  # of the part that is not complete
        self._start = 0  # position of that part

    @property
    def is_complete(self) -> bool:
        """Return True if all parts have been returned."""
        return self._start == len(self._prompt)

    def add(self, scores: PromptScores) -> Iterator[PromptPiece]:
        """Yield the parts that these scores complete. Raises StreamBroken if some are missing."""
        known = self._start + len(self._known) - scores.start
        if known < 0:
            raise StreamBroken(
                f"prompt_logprobs: the scores of {-known} prompt tokens are missing; try again"
            )
        self._known += map(self._spelled, scores.tokens[known:])
        yield from self.take()

    def take(self) -> Iterator[PromptPiece]:
        """Yield the parts that are complete."""
        while not self.is_complete:
            size = min(PART, len(self._prompt) - self._start)
            if len(self._known) < size:
                return
            begin, self._start = self._start, self._start + size
            part, self._known = self._known[:size], self._known[size:]
            yield PromptPiece(begin, self._prompt[begin : begin + size], part)

    def _spelled(self, token: ScoredToken) -> PromptLogprob:
        top = [(one, self._spell(one), value) for one, value in token.top]
        return PromptLogprob(self._spell(token.id), token.logprob, token.rank, top)
