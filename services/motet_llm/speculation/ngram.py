"""Draft by prompt lookup: propose what followed the last tokens earlier in the request.

(Prompt lookup, after Saxena 2023.) It needs no model, and pays where replies repeat their prompts:
summaries, edits, code, retrieved passages. Where one token of a repetition was replaced by another,
the draft continues behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet_llm.engine.request import Request
from motet_shared.errors import InternalError

MAX_INDEXED = 1 << 14  # last tokens of a request that are indexed: bounds the cost of a new index
MAX_POSITIONS = 4  # positions kept per pair of tokens, the last ones
MAX_MATCH = 16  # tokens that are compared for the length of a match
COMPARED = 8  # tokens, more than half of which must agree where one of them was replaced


class NgramDrafts:
    """Draft from the longest match of at least two tokens; of equal ones, from the last."""

    needs_model = False
    catch_up_tokens = 0  # there is nothing to compute before a draft

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return drafts of up to the wanted number of tokens for the requests that have a match."""
        found = {}
        for request, count in wanted:
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = _Index(len(request.tokens))
            if draft := index.draft(request.tokens, count):
                found[request] = draft
        return found

    def catch_up_for(self, _request: Request) -> int:
        """Return 0: there is nothing to compute before a draft."""
        return 0

    def observe(self, *_: object) -> None:
        """Ignore the model's step: this drafter does not use it."""

    def forget(self, request: Request) -> None:
        """Drop the index of a request that has ended."""
        self._indices.pop(request, None)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if an index is kept for a request that is not in `requests`."""
        if not self._indices.keys() <= requests:
            raise InternalError(
                f"{len(self._indices.keys() - requests)} requests that are gone are remembered"
            )


class _Index:
    """Index the positions of one request's token pairs, each as the position after the pair."""

    def __init__(self, length: int) -> None:
        self._first = self._end = max(0, length - MAX_INDEXED)
        self._positions: dict[tuple[int, int], list[int]] = {}
        self._distance = 0  # from the last match to the end of the tokens at that time

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest earlier match of the end.

        The match may be inexact (`_continue_last`). Where the copied text reaches the end of `tokens`, it
        is repeated.
        """
        self._extend(tokens)
        if len(tokens) < self._first + 2:
            return []
        positions = self._positions.get((tokens[-2], tokens[-1]), ())
        best = max(
            positions, key=lambda position: (self._match(tokens, position), position), default=None
        )
        if best is None:
            best = self._continue_last(tokens)
        if best is None:
            return []
        self._distance = len(tokens) - best
        whole = list(tokens[best:])
        while len(whole) < count:
            whole += whole
        return whole[:count]

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index the pairs that have a token after them."""
        for end in range(max(self._end, self._first + 2), len(tokens)):
            positions = self._positions.setdefault((tokens[end - 2], tokens[end - 1]), [])
            positions.append(end)
            del positions[:-MAX_POSITIONS]
        self._end = max(self._end, len(tokens))

    def _continue_last(self, tokens: Sequence[int]) -> int | None:
        """Return the position as far from the end as the last match was, if its context agrees.

        None if there was no match yet, or no more than half of the COMPARED tokens before it agree with
        the end.
        """
        position = len(tokens) - self._distance
        if not self._distance or position < self._first + COMPARED:
            return None
        same = sum(tokens[position - n] == tokens[-n] for n in range(1, COMPARED + 1))
        return position if same > COMPARED // 2 else None

    def _match(self, tokens: Sequence[int], position: int) -> int:
        """Return how many tokens before `position` agree with those at the end, up to MAX_MATCH."""
        most = min(MAX_MATCH, position - self._first)
        return next((n for n in range(2, most) if tokens[position - 1 - n] != tokens[-1 - n]), most)
