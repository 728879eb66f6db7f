"""Compute one step: the forward pass over its works, and the draws of their tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from motet_llm.attention.heavy_hitters import Watch
from motet_llm.attention.prompt_compression import PromptCompression
from motet_llm.grammar.token_mask import TokenMask
from motet_llm.scheduling.work import Work
from motet_llm.speculation.speculative_row import Row
from motet_llm.speculation.speculator import Speculation
from motet_llm.stages.code_prediction import CodePrediction
from motet_llm.stages.state_feeding import StateFeeding
from motet_llm.stages.state_sending import SentRows, StateSending
from motet_llm.stages.states import StepStates

from .counts import StepResult
from .model_runner import ModelRunner
from .prompt_scores import PromptScoring, ScoredRows
from .sampler import sample


@dataclass(slots=True, frozen=True)
class Batch:
    """Hold the works of one step, prepared.

    rows: rows that draw a token, of all works in order.
    drafts: those of the works that draw.
    mask: tokens that the rows may draw; it is computed while the model runs.
    watched: watches that record queries, each with its slice of the step's tokens.
    scored: rows that give log-probabilities of prompt tokens.
    sent: rows whose states are sent to the next stage.
    given: states of the stage before; None: no request has any.
    """

    works: Sequence[Work]
    rows: list[Row]
    drafts: list[tuple[int, ...]]
    mask: TokenMask
    watched: Sequence[tuple[Watch, slice]]
    scored: Sequence[ScoredRows]
    sent: Sequence[SentRows]
    given: StepStates | None


class ForwardPass:
    """Prepare steps on the engine's thread, and compute them on the model's."""

    def __init__(
        self,
        runner: ModelRunner,
        speculation: Speculation | None,
        compression: PromptCompression | None,
        scoring: PromptScoring,
        sending: StateSending,
        feeding: StateFeeding,
        predicting: CodePrediction,
    ):
        self._runner = runner
        self._speculation = speculation
        self._compression = compression
        self._scoring = scoring
        self._sending, self._feeding, self._predicting = sending, feeding, predicting
        self._idle_since: float | None = None  # when the last step ended, if work was left

    def prepare(self, works: Sequence[Work]) -> Batch:
        """Collect what a step needs besides the works themselves."""
        rows = [row for work in works for row in work.rows]
        return Batch(
            works,
            rows,
            [work.draft for work in works if work.draws],
            TokenMask(rows, self._runner.vocab, self._runner.device),
            () if self._compression is None else self._compression.observations(works),
            self._scoring.rows(works),
            self._sending.rows(works),
            self._feeding.of_step(works),
        )

    def compute(self, batch: Batch) -> StepResult:
        """Run the model and sample; waits for the mask before it draws."""
        started = time.perf_counter()
        waited = 0.0 if self._idle_since is None else started - self._idle_since
        forward = self._runner.forward(batch.works, batch.watched, batch.given)
        scores = self._scoring.compute(batch.scored)
        states = self._sending.compute(batch.sent, forward)
        model_seconds = time.perf_counter() - started
        sampled = sample(forward.logits_RV, batch.rows, batch.mask, batch.drafts)
        codes = self._predicting.compute(batch.works, forward, sampled.ids)
        if self._speculation is not None:
            self._speculation.drafts.observe(batch.works, forward, sampled)
        num_finite = forward.num_finite
        self._idle_since = time.perf_counter()
        seconds = self._idle_since - started
        if self._runner.on_gpu:  # reading the tokens is what waits for the GPU
            model_seconds = seconds
        return StepResult(
            num_finite, sampled, scores, states, codes, waited, model_seconds, seconds
        )

    def exclude(self, seconds: float) -> None:
        """Do not count `seconds` since the last step as idle: the model's thread was in use."""
        if self._idle_since is not None:
            self._idle_since += seconds

    def mark_idle(self) -> None:
        """Do not count the time until the next step as idle: nothing is left to compute."""
        self._idle_since = None
