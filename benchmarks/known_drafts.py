"""Drafts that know the answer: right as often as they are told to be, so that speed can be measured on random weights.

What they cost is what they cost otherwise: a draft model computes, and its token is then exchanged; a lookup looks up.
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


class KnownModel(DraftModel):
    """A draft model whose tokens are right with a probability of `right`, whatever it says."""

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


class Reminded(NgramDrafts):
    """Lookup for requests that seem to have their answers in their prompts, one of `every` tokens changed. wrong: what
    it finds is exchanged for something else."""

    def __init__(self, vocab: int, every: int, *, wrong: bool = False):
        super().__init__()
        self._shift = int(wrong)
        self.answers: Answers = {}
        self._vocab, self._every = vocab, every
        self._readers: dict[Request, Request] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        found = super().propose([(self._reader(request), count) for request, count in wanted])
        return {
            real: [(token + self._shift) % self._vocab for token in found[reader]]
            for real, reader in self._readers.items()
            if reader in found
        }

    def _reader(self, request: Request) -> Request:
        """The request with its answer, nearly, before its prompt."""
        reader = self._readers.get(request)
        if reader is None:
            answer = self.answers.get(request.key, [])
            text = [
                (token + (at % self._every == 0)) % self._vocab
                for at, token in enumerate(answer, 1)
            ]
            tokens = text + request.tokens
            reader = Request(
                request.key, request.arrival, tokens, request.sampling, max_length=len(tokens) + 1
            )
            self._readers[request] = reader
        missing = len(request.tokens) - (len(reader.tokens) - self._told(request))
        reader.tokens += request.tokens[len(request.tokens) - missing :] if missing > 0 else []
        return reader

    def _told(self, request: Request) -> int:
        return len(self.answers.get(request.key, []))

    def forget(self, request: Request) -> None:
        if (reader := self._readers.pop(request, None)) is not None:
            super().forget(reader)

    def check_integrity(self, requests: set[Request]) -> None:
        super().check_integrity(
            {self._readers[request] for request in requests if request in self._readers}
        )
