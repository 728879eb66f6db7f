"""Count what the engine's steps compute, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from motet_llm.grammar.token_mask import TokenMask
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_llm.scheduling.work import Work
from motet_llm.stages.states import SentStates
from motet_shared.messages import PromptScores

from .request import Request
from .sampler import Sampled


@dataclass(slots=True, frozen=True)
class StepResult:
    """Hold the result of one step's computation, with the times it took.

    num_finite: for each work, how many of its first tokens are free of NaN and infinity.
    scores: log-probabilities of prompt tokens, by request.
    states: of tokens whose states are sent, by request.
    codes: the further codes of frames that begin with the drawn tokens, by request.
    waited: seconds that the model was idle before the step although there was work.
    model_seconds: seconds of the forward pass.
    seconds: seconds of the forward pass and sampling together.
    """

    num_finite: list[int]
    sampled: Sampled
    scores: dict[Request, PromptScores]
    states: dict[Request, SentStates]
    codes: dict[Request, list[int]]
    waited: float
    model_seconds: float
    seconds: float


@dataclass(slots=True)
class StepCounts:
    """Sum over all steps, and hold the size and duration of the last one."""

    steps: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    batch_size: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    python_seconds: float = 0.0
    masked_steps: int = 0
    mask_seconds: float = 0.0
    # Steps with decode rows: those that only decode, and those that also prefill.
    decode_steps: int = 0
    decode_seconds: float = 0.0
    mixed_steps: int = 0
    mixed_seconds: float = 0.0
    mixed_tokens: int = 0  # prefilled by the mixed steps


class StepAccounts:
    """Account for the steps: counts for reports, step times for the scheduler, times of requests.

    Call `record` once per step, before its tokens are appended.
    """

    def __init__(self, pace: StepTimeEstimate):
        self._pace = pace
        self._counts = StepCounts()

    def record(self, works: Sequence[Work], mask: TokenMask, computed: StepResult) -> None:
        """Add one step."""
        num_decodes = sum(work.request.num_uncomputed == 1 for work in works)
        num_tokens = sum(work.num_tokens for work in works)
        num_prefill = num_tokens - num_decodes - sum(len(work.draft) for work in works)
        self._pace.note(computed.seconds, num_decodes, num_prefill)
        counts = self._counts
        counts.steps += 1
        counts.tokens += num_tokens
        counts.batch_size = len(works)
        counts.step_seconds = computed.waited + computed.seconds
        counts.model_seconds += computed.model_seconds
        counts.python_seconds += computed.waited
        counts.masked_steps += not mask.empty
        counts.mask_seconds += mask.seconds
        self._add_mix(computed.seconds, num_decodes, num_prefill)
        self._share(works, num_tokens, computed)

    def _add_mix(self, seconds: float, num_decodes: int, num_prefill: int) -> None:
        """Add a step's time to the steps that only decode, or to the mixed ones."""
        counts = self._counts
        if num_decodes and num_prefill:
            counts.mixed_steps += 1
            counts.mixed_seconds += seconds
            counts.mixed_tokens += num_prefill
        elif num_decodes:
            counts.decode_steps += 1
            counts.decode_seconds += seconds

    def _share(self, works: Sequence[Work], num_tokens: int, computed: StepResult) -> None:
        """Add the step to the times of its requests, by their shares of its tokens."""
        now = time.monotonic()
        for work in works:
            times = work.request.times
            if times.started_at is None:
                self._counts.cached_tokens += work.request.num_cached or 0
                times.started_at = now - computed.seconds - (times.transfer_seconds or 0.0)
            times.model_seconds += computed.model_seconds * work.num_tokens / num_tokens

    @property
    def steps(self) -> int:
        """Return the number of steps that were computed."""
        return self._counts.steps

    def stats(self) -> dict[str, float]:
        return asdict(self._counts)
