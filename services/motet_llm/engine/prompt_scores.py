"""Compute log-probabilities of prompt tokens, a bounded number of rows at a time.

Each token is scored from the logits of the token before it, so the first one has no score. All
tokens are computed here: a request with scores neither uses the prefix cache nor a prefill worker.
Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from motet_kernels.sampling import sampling
from motet_llm.scheduling.work import Work
from motet_shared.errors import InternalError
from motet_shared.messages import PromptScores, ScoredToken

from .feature import Feature
from .model_runner import ModelRunner
from .request import Request, RequestOptions

CHUNK = 256  # tokens of a scored prompt per step: bounds the message in which their scores leave
LOGITS = 32 << 20  # bytes of logits that are kept at a time


@dataclass(slots=True, frozen=True)
class ScoredRows:
    """Rows of a step whose next tokens are known and scored.

    rows: positions among the step's tokens. start: position of the first scored token in the
    prompt. ids: the tokens. most: how many of the most likely tokens are listed for each.
    """

    request: Request
    rows: range
    start: int
    ids: list[int]
    most: int


class PromptScoring(Feature):
    """Score the prompts of requests with `Sampling.prompt_logprobs`."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._next: dict[Request, int] = {}  # position of the next token to score

    def admit(self, request: Request, options: RequestOptions) -> None:
        if request.sampling.prompt_logprobs < 0 or request.num_prompt < 2 or options.get("output"):
            return
        self._next[request] = 1
        request.constraints.scores_prompt = True
        request.constraints.match_end = 0
        request.constraints.chunk_most = CHUNK

    def forget(self, request: Request) -> None:
        self._next.pop(request, None)

    def rows(self, works: Sequence[Work]) -> list[ScoredRows]:
        """Return the rows of a step to score; those that were scored before a preemption are not."""
        if not self._next:
            return []
        found = []
        starts = [0, *accumulate(work.num_tokens for work in works)]
        for offset, work in zip(starts, works, strict=False):
            request = work.request
            if (first := self._next.get(request)) is None:
                continue
            begin, end = work.span
            low, high = max(begin, first - 1), min(end, request.num_prompt - 1)
            if low < high:
                rows = range(offset + low - begin, offset + high - begin)
                ids = request.tokens[low + 1 : high + 1]
                most = request.sampling.prompt_logprobs
                found.append(ScoredRows(request, rows, low + 1, ids, most))
        return found

    def compute(self, scored: Sequence[ScoredRows]) -> dict[Request, PromptScores]:
        """Return the scores of the step that the model has just computed, by request."""
        return {one.request: PromptScores(one.start, self._score(one)) for one in scored}

    def _score(self, one: ScoredRows) -> list[ScoredToken]:
        size = max(1, LOGITS // (4 * self._runner.vocab))
        tokens: list[ScoredToken] = []
        for at in range(0, len(one.rows), size):
            tokens += self._score_rows(one.rows[at : at + size], one.ids[at : at + size], one.most)
        return tokens

    def _score_rows(self, rows: range, ids: list[int], most: int) -> list[ScoredToken]:
        logits_RV = self._runner.logits_of(rows)
        ids_R = torch.tensor(ids, device=logits_RV.device)
        found = sampling.logprobs(logits_RV, range(len(rows)), ids_R, most)
        own_R1 = logits_RV.gather(1, ids_R.unsqueeze(1))
        rank_R = (logits_RV > own_R1).sum(1) + 1
        columns = (
            ids,
            found.chosen_L.tolist(),
            rank_R.tolist(),
            found.ids_LN.tolist(),
            found.values_LN.tolist(),
        )
        return [
            ScoredToken(token, logprob, rank, list(zip(top, values, strict=True)))
            for token, logprob, rank, top, values in zip(*columns, strict=True)
        ]

    def take(self, scores: Mapping[Request, PromptScores]) -> None:
        """Continue behind scores that are about to be sent."""
        for request, one in scores.items():
            end = one.start + len(one.tokens)
            if request in self._next:
                self._next[request] = end
                request.constraints.scores_prompt = end < request.num_prompt

    def check_integrity(self, requests: set[Request]) -> None:
        if not self._next.keys() <= requests:
            raise InternalError("prompts of requests that have ended are scored")
