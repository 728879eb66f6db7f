"""Drafts from what a request has said before: where its last tokens stand earlier in it, what followed them there.

(Prompt lookup, after Saxena 2023.) It costs no model, and pays where answers repeat their prompts: summaries, edits,
code, retrieved passages. Where a token of what is repeated was exchanged for another one, it goes on behind that.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet_shared.errors import InternalError

from .request import Request

MOST_SEEN = 1 << 14  # of a request's last tokens: what an index may cost when it is made
MOST_PLACES = 4  # of a pair of tokens, the last ones
LONGEST = 16  # tokens: places are compared no farther back
NEAR = 8  # tokens, most of which must be the same where one of them was exchanged


class NgramDrafts:
    """The longest match of at least two tokens wins, of equal ones the last."""

    needs_model = False
    overdue = 0  # it has nothing to compute first

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Up to so many tokens that may come next, of each request for which something is found."""
        found = {}
        for request, count in wanted:
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = _Index(len(request.tokens))
            if draft := index.draft(request.tokens, count):
                found[request] = draft
        return found

    def due(self, _request: Request) -> int:
        """Nothing."""
        return 0

    def observe(self, *_: object) -> None:
        """What the model computes says nothing here."""

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._indices.pop(request, None)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if one is remembered that is gone."""
        if not self._indices.keys() <= requests:
            raise InternalError(f"{len(self._indices.keys() - requests)} requests that are gone are remembered")


class _Index:
    """Of the tokens of one request, which grow at their end: behind which tokens each pair of them ends."""

    def __init__(self, length: int) -> None:
        self._first = self._end = max(0, length - MOST_SEEN)
        self._places: dict[tuple[int, int], list[int]] = {}
        self._distance = 0  # from the place that was found last to the end, as it was then

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the longest of the places at which `tokens` have stood before, or nearly: up to `count` tokens.

        Where that runs into the end, it goes on with itself.
        """
        self._extend(tokens)
        if len(tokens) < self._first + 2:
            return []
        places = self._places.get((tokens[-2], tokens[-1]), ())
        best = max(places, key=lambda place: (self._match(tokens, place), place), default=None)
        if best is None:
            best = self._beside(tokens)
        if best is None:
            return []
        self._distance = len(tokens) - best
        whole = list(tokens[best:])
        while len(whole) < count:
            whole += whole
        return whole[:count]

    def _extend(self, tokens: Sequence[int]) -> None:
        """Take in the pairs that have something behind them."""
        for end in range(max(self._end, self._first + 2), len(tokens)):
            places = self._places.setdefault((tokens[end - 2], tokens[end - 1]), [])
            places.append(end)
            del places[:-MOST_PLACES]
        self._end = max(self._end, len(tokens))

    def _beside(self, tokens: Sequence[int]) -> int | None:
        """As far back as the last place was, if most of what stands there is what stands at the end."""
        place = len(tokens) - self._distance
        if not self._distance or place < self._first + NEAR:
            return None
        same = sum(tokens[place - n] == tokens[-n] for n in range(1, NEAR + 1))
        return place if same > NEAR // 2 else None

    def _match(self, tokens: Sequence[int], place: int) -> int:
        """How many tokens before `place` are those at the end."""
        most = min(LONGEST, place - self._first)
        return next((n for n in range(2, most) if tokens[place - 1 - n] != tokens[-1 - n]), most)
