"""Control draft lengths from measured step times: drafts must gain time and never cost much.

A step without drafts takes some seconds and yields one token per row: that ratio is the value of a
token. A drafted token adds seconds to the step, more of them the larger the batch, and is right
with the request's recent acceptance rate, if all tokens before it are right. The draft length is
the one with the largest expected gain over its cost; where no length gains anything, the request
goes without drafts and is tried again later, after an interval that doubles each time.

These are estimates. The loss is bounded by a budget account: it earns a share of the elapsed time,
drafts pay in what they gained and withdraw what they cost, and drafting stops while it is empty. A
drafter may first have to compute a request's tokens (catch-up prefill), which pays only once all of
them are computed: that starts when the account covers the whole of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median_high

SHARE = 0.01  # fraction of the elapsed time that drafts may cost
BALANCE = 32  # upper bound of the account, in durations of a step without drafts
START = 2  # initial balance, in the same unit
FRESH = 48  # steps between two plain ones, which keep the cost of a plain step up to date
HISTORY = 32
MARGIN = 1.15  # required ratio of gain to cost of a drafted token: both are estimates
UNLIKELY = 0.05  # minimum cost of a drafted token, in tokens: no draft below this acceptance
LEAST = 3  # measurements that an estimate needs
PRIOR = 0.7  # acceptance probability before anything is measured
TRUST = 6.0  # weight of the shared estimate in a new request's own, in drafted tokens
PATIENCE = 32  # steps without drafts before a request is tried again, doubled each time
MOST_PATIENCE = 512  # upper bound of that


@dataclass(slots=True)
class AcceptanceEstimate:
    """Estimate the probability that the next drafted token of a request is right.

    `right` and `seen` count accepted and judged draft tokens; both decay by `fading` per draft.
    """

    right: float
    seen: float
    fading: float = 0.9  # decay factor per draft
    patience: int = PATIENCE
    skipped: int = 0

    @property
    def rate(self) -> float:
        return self.right / self.seen

    def note(self, drafted: int, right: int) -> None:
        """Record that the first `right` of `drafted` tokens were accepted.

        Tokens behind the first wrong one carry no information and are not counted.
        """
        self.right = self.fading * self.right + right
        self.seen = self.fading * self.seen + min(drafted, right + 1)

    def length(self, prices: Sequence[float]) -> int:
        """Return the draft length with the largest expected gain, 0 if none gains.

        An accepted token is worth 1; `prices[k - 1]` is the cost of a draft of `k` tokens in the
        same unit.
        """
        best, most, right, chance = 0, 0.0, 0.0, 1.0
        for length, price in enumerate(prices, 1):
            chance *= self.rate
            right += chance
            if right - price > most:
                best, most = length, right - price
        if best:
            self.patience, self.skipped = PATIENCE, 0
        else:
            self.skipped += 1
        return best

    @property
    def impatient(self) -> bool:
        """Return True if the request has gone without drafts long enough to be tried again."""
        return self.skipped >= self.patience

    def try_again(self) -> None:
        """Restart the wait, twice as long, as the request is tried with a draft of one token."""
        self.patience, self.skipped = min(2 * self.patience, MOST_PATIENCE), 0


@dataclass(slots=True)
class StepCosts:
    """Keep step times in seconds for one class of batch sizes.

    `plain`: steps without drafts. `drafted`: the number of drafted tokens of a step, and its time
    beyond that of a plain step.
    """

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    drafted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    since_plain: int = 0
    met: set[int] = field(default_factory=set)  # draft lengths that have run before

    @property
    def token(self) -> float:
        """Return the seconds per drafted token: a median, weighted by the number of drafted tokens.

        The weights matter because the extra time of a step with a single drafted token is mostly
        noise, and as likely to be negative as positive.
        """
        each = sorted((seconds / count, count) for count, seconds in self.drafted)
        weights = list(accumulate(count for _, count in each))
        return max(0.0, each[bisect_left(weights, weights[-1] / 2)][0])

    def drafts(self, most: int, rows: int) -> list[float]:
        """Return the seconds that drafts of 1, 2, … `most` tokens cost one row.

        For a single row the measured time of that draft length is used where it is known, else the
        cost per token of the next shorter draft: the cost jumps where one more token makes the
        kernels read each matrix once more.
        """
        token, found = self.token, []
        for count in range(1, most + 1):
            alike = (
                [seconds for drafted, seconds in self.drafted if drafted == count]
                if rows == 1
                else []
            )
            if len(alike) >= LEAST:
                token = max(0.0, median_high(alike)) / count
            found.append(count * token)
        return found


class SpeculationController:
    """Decide the draft lengths of one engine.

    `most`: upper bound of a draft's length in tokens. `always`: draft the full length in every
    step, for comparisons and tests.
    """

    def __init__(self, most: int, *, always: bool = False):
        self.most = most
        self.always = always
        self._all = AcceptanceEstimate(PRIOR, 1.0, fading=0.98)
        self._overdue: deque[float] = deque(maxlen=HISTORY)  # seconds per catch-up token
        self._prices: dict[int, StepCosts] = {}
        self._account = 0.0
        self._most_in_account = 0.0

    def odds(self) -> AcceptanceEstimate:
        """Return a new request's estimate: the shared acceptance rate, at limited weight."""
        seen = min(self._all.seen, TRUST)
        return AcceptanceEstimate(self._all.rate * seen, seen)

    def note_draft(self, odds: AcceptanceEstimate, drafted: int, right: int) -> None:
        """Record that the first `right` of `drafted` tokens of a request were accepted."""
        for each in (odds, self._all):
            each.note(drafted, right)

    def lengths(self, odds: Sequence[AcceptanceEstimate], dues: Sequence[int] = ()) -> list[int]:
        """Return the number of tokens to draft for each request that decodes in the next step.

        dues: for each request, its catch-up tokens, which must be computed before it can be drafted
        for; empty if there are none.
        """
        if self.always:
            return [self.most] * len(odds)
        none = [0] * len(odds)
        prices = self._of(len(odds))
        prices.since_plain += 1
        if len(prices.plain) < LEAST or prices.since_plain > FRESH or self._account <= 0:
            return none
        if len(prices.drafted) < LEAST:
            return self._afford(_trial(len(odds)), dues)
        in_tokens = MARGIN * len(odds) / median_high(prices.plain)
        drafts = enumerate(prices.drafts(self.most, len(odds)), 1)
        costs = [max(n * UNLIKELY, in_tokens * seconds) for n, seconds in drafts]
        lengths = [one.length(costs) for one in odds]
        again = next((at for at, one in enumerate(odds) if one.impatient), None)
        if again is not None and self._account > prices.token:
            odds[
                again
            ].try_again()  # one request per step: together they would cost as much as a step
            lengths[again] = 1
        return self._afford(lengths, dues)

    def _afford(self, lengths: list[int], dues: Sequence[int]) -> list[int]:
        """Drop drafts whose catch-up prefill exceeds the account; the cheapest are kept first."""
        price = median_high(self._overdue) if self._overdue else 0.0
        left = self._account
        for at in sorted(range(len(dues)), key=dues.__getitem__):
            if lengths[at] and dues[at]:
                left -= dues[at] * price
                lengths[at] = lengths[at] if left > 0 else 0
        return lengths

    def note_plain(self, rows: int, seconds: float) -> None:
        """Record a step in which `rows` requests decoded, without drafts or prefill."""
        prices = self._of(rows)
        prices.plain.append(seconds)
        prices.since_plain = 0
        plain = median_high(prices.plain)
        if not self._most_in_account:
            self._account = START * plain
        self._most_in_account = BALANCE * plain
        self._earn(seconds)

    def note_drafted(
        self, rows: int, drafted: int, right: int, seconds: float, *, overdue: int = 0
    ) -> None:
        """Record a step in which `right` of `drafted` tokens were accepted.

        `seconds` includes drafting and the catch-up prefill of `overdue` tokens; where there are
        any, the step is not used to estimate the cost of a drafted token.
        """
        prices = self._of(rows)
        if not prices.plain:
            return
        plain = median_high(prices.plain)
        if rows == 1 and drafted and drafted not in prices.met:
            prices.met.add(
                drafted
            )  # a single row runs from a tape, which the first step of each length records
            self._earn(seconds)
            return
        if drafted and not overdue:
            prices.drafted.append((drafted, seconds - plain))
        if overdue:
            expected = plain + (drafted * prices.token if prices.drafted else 0.0)
            self._overdue.append(max(0.0, seconds - expected) / overdue)
        # A step faster than a plain one is noise or has fewer rows: its cost counts as 0, not less.
        self._account -= max(0.0, seconds - plain) - plain * right / rows
        self._earn(seconds)

    def note_other(self, seconds: float) -> None:
        """Record a step in which prompts were computed."""
        self._earn(seconds)

    def _earn(self, seconds: float) -> None:
        self._account = min(self._account + SHARE * seconds, self._most_in_account)

    def _of(self, rows: int) -> StepCosts:
        """Return the costs of the batch-size class of `rows`: up to 1, 2, 4, 8, … rows."""
        return self._prices.setdefault((rows - 1).bit_length(), StepCosts())


def _trial(rows: int) -> list[int]:
    """Return trial lengths that measure the cost: 1 for a quarter of the rows, at least for one."""
    return [int(row < max(1, rows // 4)) for row in range(rows)]
