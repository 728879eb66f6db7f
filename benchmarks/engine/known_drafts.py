"""Draft with a given acceptance rate, to measure speculation on random weights.

Costs are unchanged: a draft model computes, and its token is replaced; a lookup searches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from motet_llm.config import EngineConfig
from motet_llm.engine.model_runner import ModelRunner
from motet_llm.engine.request import Key, Request
from motet_llm.speculation.draft_model import DraftModel
from motet_llm.speculation.draft_request import DraftRequest
from motet_llm.speculation.ngram import NgramDrafts

Answers = dict[Key, list[int]]


class KnownDraftModel(DraftModel):
    """Run a draft model whose tokens are replaced to be right with probability `right`."""

    def __init__(self, config: EngineConfig, target: ModelRunner, right: float):
        super().__init__(config, target)
        self.answers: Answers = {}
        self._right = right
        self._random = random.Random(0)

    def extend(self, draft_request: DraftRequest, token: int) -> bool:
        answer, at = self.answers.get(draft_request.key, []), draft_request.num_output
        due = answer[at] if at < len(answer) else token
        return draft_request.extend(
            due if self._random.random() < self._right else (due + 1) % self.runner.vocab
        )


class KnownNgramDrafts(NgramDrafts):
    """Look drafts up as if prompts contained their answers, one of `every` tokens changed.

    wrong: replace all drafted tokens by wrong ones.
    """

    def __init__(self, vocab: int, every: int, *, wrong: bool = False):
        super().__init__()
        self._shift = int(wrong)
        self.answers: Answers = {}
        self._vocab, self._every = vocab, every
        self._prompted: dict[Request, Request] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        found = super().propose([(self._with_answer(request), count) for request, count in wanted])
        return {
            request: [(token + self._shift) % self._vocab for token in found[prompted]]
            for request, prompted in self._prompted.items()
            if prompted in found
        }

    def _with_answer(self, request: Request) -> Request:
        """Return the request with most of its answer before its prompt."""
        prompted = self._prompted.get(request)
        if prompted is None:
            answer = self.answers.get(request.key, [])
            text = [
                (token + (at % self._every == 0)) % self._vocab
                for at, token in enumerate(answer, 1)
            ]
            tokens = text + request.tokens
            prompted = Request(
                request.key, request.arrival, tokens, request.sampling, max_length=len(tokens) + 1
            )
            self._prompted[request] = prompted
        missing = len(request.tokens) - (len(prompted.tokens) - self._answer_length(request))
        prompted.tokens += request.tokens[len(request.tokens) - missing :] if missing > 0 else []
        return prompted

    def _answer_length(self, request: Request) -> int:
        return len(self.answers.get(request.key, []))

    def forget(self, request: Request) -> None:
        if (prompted := self._prompted.pop(request, None)) is not None:
            super().forget(prompted)

    def check_integrity(self, requests: set[Request]) -> None:
        super().check_integrity(
            {self._prompted[request] for request in requests if request in self._prompted}
        )
