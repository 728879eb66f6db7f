"""Control draft lengths from measured step times: drafts must gain time and never cost much.

Draft tokens are verified in order up to the first wrong one. If each is right with the acceptance
rate α (alpha), a draft of γ (gamma) tokens adds

    α + α² + … + α^γ = (1 - α^(γ+1)) / (1 - α) - 1

accepted tokens to the one that every step yields (Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding", equation 1). It also adds seconds to the step, more of them
the larger the batch. In units of the time that a step without drafts takes per token, these are the
cost c(γ), and the draft length is the γ that maximizes

    gain(γ) = α + α² + … + α^γ - c(γ)

Where no length gains anything, the request is decoded without drafts and is tried again later,
after an interval that doubles each time. α is estimated per request, c from measured steps.

These are estimates, so the loss is bounded by an overhead budget: it earns a share of the elapsed
time, drafts add the time that they gained and subtract what they cost, and drafting stops while it
is empty. A drafter may first have to compute a request's tokens (catch-up prefill), which pays only
once all of them are computed: that starts when the budget covers the whole of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median_high

OVERHEAD_SHARE = 0.01  # fraction of the elapsed time that the overhead budget earns
MAX_BUDGET_STEPS = 32  # upper bound of the budget, in durations of a step without drafts
INITIAL_BUDGET_STEPS = 2  # in the same unit
PLAIN_STEP_INTERVAL = 48  # steps between two without drafts, which keep their cost up to date
HISTORY = 32  # measurements that are kept of each kind
MIN_SAMPLES = 3  # measurements that an estimate needs
COST_MARGIN = 1.15  # factor on measured costs, since costs and gains are estimates
MIN_TOKEN_COST = 0.05  # lower bound of c(γ) / γ: no draft where the acceptance rate is lower
PRIOR_ACCEPTANCE_RATE = 0.7  # before anything is measured
PRIOR_WEIGHT = 6.0  # weight of the shared estimate in a new request's own, in draft tokens
RETRY_INTERVAL = 32  # steps without drafts before a request is tried again, doubled each time
MAX_RETRY_INTERVAL = 512


@dataclass(slots=True)
class AcceptanceEstimate:
    """Estimate the probability that the next draft token of a request is right.

    `accepted` and `verified` count draft tokens; both decay by `decay` per draft.
    """

    accepted: float
    verified: float
    decay: float = 0.9
    retry_interval: int = RETRY_INTERVAL
    skipped_steps: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.verified

    def record(self, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens were accepted.

        Tokens behind the first wrong one carry no information and are not counted.
        """
        self.accepted = self.decay * self.accepted + accepted
        self.verified = self.decay * self.verified + min(drafted, accepted + 1)

    def length(self, costs: Sequence[float]) -> int:
        """Return the draft length with the largest expected gain, 0 if none gains.

        An accepted token is worth 1; `costs[k - 1]` is the cost of a draft of `k` tokens in the
        same unit.
        """
        best_length, best_gain, expected, probability = 0, 0.0, 0.0, 1.0
        for length, cost in enumerate(costs, 1):
            probability *= self.rate
            expected += probability
            if expected - cost > best_gain:
                best_length, best_gain = length, expected - cost
        if best_length:
            self.retry_interval, self.skipped_steps = RETRY_INTERVAL, 0
        else:
            self.skipped_steps += 1
        return best_length

    @property
    def should_retry(self) -> bool:
        """Return True if the request has gone without drafts long enough to be tried again."""
        return self.skipped_steps >= self.retry_interval

    def start_retry(self) -> None:
        """Restart the wait, twice as long, as the request is tried with a draft of one token."""
        self.retry_interval = min(2 * self.retry_interval, MAX_RETRY_INTERVAL)
        self.skipped_steps = 0


@dataclass(slots=True)
class StepCosts:
    """Keep step times in seconds for one class of batch sizes.

    `plain`: steps without drafts. `drafted`: the number of draft tokens of a step, and its time
    beyond that of a plain step.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    drafted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    since_plain: int = 0
    recorded_lengths: set[int] = field(default_factory=set)  # draft lengths that have run before

    @property
    def seconds_per_token(self) -> float:
        """Return the seconds per draft token: a median, weighted by the number of draft tokens.

        The weights matter because the extra time of a step with a single draft token is mostly
        noise, and as likely to be negative as positive.
        """
        samples = sorted((seconds / count, count) for count, seconds in self.drafted)
        weights = list(accumulate(count for _, count in samples))
        return max(0.0, samples[bisect_left(weights, weights[-1] / 2)][0])

    def draft_seconds(self, max_length: int, rows: int) -> list[float]:
        """Return the seconds that drafts of 1, 2, … `max_length` tokens cost one row.

        For a single row the measured time of that draft length is used where it is known, else the
        cost per token of the next shorter draft: the cost jumps where one more token makes the
        kernels read each matrix once more.
        """
        per_token, costs = self.seconds_per_token, []
        for length in range(1, max_length + 1):
            samples = [seconds for count, seconds in self.drafted if count == length]
            if rows == 1 and len(samples) >= MIN_SAMPLES:
                per_token = max(0.0, median_high(samples)) / length
            costs.append(length * per_token)
        return costs


class SpeculationController:
    """Decide the draft lengths of one engine.

    `max_length`: upper bound of a draft's length in tokens. `always`: draft the full length in
    every step, for comparisons and tests.
    """

    def __init__(self, max_length: int, *, always: bool = False):
        self.max_length = max_length
        self.always = always
        self._shared = AcceptanceEstimate(PRIOR_ACCEPTANCE_RATE, 1.0, decay=0.98)
        self._catch_up_seconds: deque[float] = deque(maxlen=HISTORY)  # per catch-up token
        self._costs: dict[int, StepCosts] = {}
        self._budget = 0.0  # seconds that drafts may still cost
        self._max_budget = 0.0

    def new_estimate(self) -> AcceptanceEstimate:
        """Return a new request's estimate: the shared acceptance rate, at limited weight."""
        verified = min(self._shared.verified, PRIOR_WEIGHT)
        return AcceptanceEstimate(self._shared.rate * verified, verified)

    def record_draft(self, estimate: AcceptanceEstimate, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of `drafted` tokens of a request were accepted."""
        for each in (estimate, self._shared):
            each.record(drafted, accepted)

    def lengths(
        self, estimates: Sequence[AcceptanceEstimate], catch_up: Sequence[int] = ()
    ) -> list[int]:
        """Return the number of tokens to draft for each request that decodes in the next step.

        catch_up: for each request, the tokens that the drafter must compute before it can draft for
        it; empty if there are none.
        """
        rows = len(estimates)
        if self.always:
            return [self.max_length] * rows
        costs = self._costs_of(rows)
        costs.since_plain += 1
        needs_plain = len(costs.plain) < MIN_SAMPLES or costs.since_plain > PLAIN_STEP_INTERVAL
        if needs_plain or self._budget <= 0:
            return [0] * rows
        if len(costs.drafted) < MIN_SAMPLES:
            return self._within_budget(_trial_lengths(rows), catch_up)
        tokens_per_second = rows / median_high(costs.plain)
        drafts = enumerate(costs.draft_seconds(self.max_length, rows), 1)
        in_tokens = [
            max(length * MIN_TOKEN_COST, COST_MARGIN * tokens_per_second * seconds)
            for length, seconds in drafts
        ]
        lengths = [estimate.length(in_tokens) for estimate in estimates]
        retried = next((row for row, each in enumerate(estimates) if each.should_retry), None)
        # One request per step: together they would cost as much as a step.
        if retried is not None and self._budget > costs.seconds_per_token:
            estimates[retried].start_retry()
            lengths[retried] = 1
        return self._within_budget(lengths, catch_up)

    def _within_budget(self, lengths: list[int], catch_up: Sequence[int]) -> list[int]:
        """Drop drafts whose catch-up prefill exceeds the budget; the cheapest are kept first."""
        per_token = median_high(self._catch_up_seconds) if self._catch_up_seconds else 0.0
        left = self._budget
        for row in sorted(range(len(catch_up)), key=catch_up.__getitem__):
            if lengths[row] and catch_up[row]:
                left -= catch_up[row] * per_token
                lengths[row] = lengths[row] if left > 0 else 0
        return lengths

    def record_plain_step(self, rows: int, seconds: float) -> None:
        """Record a step in which `rows` requests decoded, without drafts or prefill."""
        costs = self._costs_of(rows)
        costs.plain.append(seconds)
        costs.since_plain = 0
        plain = median_high(costs.plain)
        if not self._max_budget:
            self._budget = INITIAL_BUDGET_STEPS * plain
        self._max_budget = MAX_BUDGET_STEPS * plain
        self._earn(seconds)

    def record_drafted_step(
        self, rows: int, drafted: int, accepted: int, seconds: float, *, catch_up: int = 0
    ) -> None:
        """Record a step in which `accepted` of `drafted` tokens were accepted.

        `seconds` includes drafting and the catch-up prefill of `catch_up` tokens; where there are
        any, the step is not used to estimate the cost of a draft token.
        """
        costs = self._costs_of(rows)
        if not costs.plain:
            return
        plain = median_high(costs.plain)
        # A single row replays a recording of the step, made by the first step of each length.
        if rows == 1 and drafted and drafted not in costs.recorded_lengths:
            costs.recorded_lengths.add(drafted)
            self._earn(seconds)
            return
        if drafted and not catch_up:
            costs.drafted.append((drafted, seconds - plain))
        if catch_up:
            expected = plain + (drafted * costs.seconds_per_token if costs.drafted else 0.0)
            self._catch_up_seconds.append(max(0.0, seconds - expected) / catch_up)
        # A step faster than a plain one is noise or has fewer rows: its cost counts as 0, not less.
        self._budget -= max(0.0, seconds - plain) - plain * accepted / rows
        self._earn(seconds)

    def record_prefill_step(self, seconds: float) -> None:
        """Record a step in which prompts were computed."""
        self._earn(seconds)

    def _earn(self, seconds: float) -> None:
        self._budget = min(self._budget + OVERHEAD_SHARE * seconds, self._max_budget)

    def _costs_of(self, rows: int) -> StepCosts:
        """Return the costs of the batch-size class of `rows`: up to 1, 2, 4, 8, … rows."""
        return self._costs.setdefault((rows - 1).bit_length(), StepCosts())


def _trial_lengths(rows: int) -> list[int]:
    """Return trial lengths that measure the cost: 1 for a quarter of the rows, at least for one."""
    return [int(row < max(1, rows // 4)) for row in range(rows)]
