"""Whether drafts pay, decided step by step from what is measured: they are to gain, and never to cost much.

A step without drafts takes some seconds and brings a token for each of its rows: so that is what a token is worth. A
drafted token adds seconds to the step, more of them the busier it is, and is right as often as those of its request
were of late, if all before it are. A draft is as long as brings the most beyond its price; where no length brings any,
the request goes without, and is tried again after a while, each time a longer one.

All this is an estimate. What bounds the loss is an account: it earns a share of the time that passes, drafts pay in
what they gained and take out what they cost, and there are none while it is empty. Who guesses may have to compute a
request's tokens first, which pays once all of them are computed, not before: so that begins when the account can pay
for the whole of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median_high

SHARE = 0.01  # of the time: what drafts may cost
BALANCE = 32  # steps without drafts whose time the account holds at most
START = 2  # the same, at the beginning
FRESH = 48  # steps after which one goes without drafts, to know what that takes now
HISTORY = 32
MARGIN = 1.15  # by which a drafted token is to bring more than it costs: both are estimates
UNLIKELY = 0.05  # a drafted token that is right no more often than this is not worth any price
LEAST = 3  # measurements without which nothing is known
PRIOR = 0.7  # of a drafted token to be right, before anything is known
TRUST = 6.0  # drafted tokens of its own that weigh as much for a request as what others had of late
PATIENCE = 32  # steps that a request goes without drafts before it is tried again, doubled up to...
MOST_PATIENCE = 512


@dataclass(slots=True)
class Odds:
    """How likely the next drafted token of a request is to be right. `right`, `seen`: those of late, fading."""

    right: float
    seen: float
    fading: float = 0.9  # per draft
    patience: int = PATIENCE
    skipped: int = 0

    @property
    def rate(self) -> float:
        return self.right / self.seen

    def note(self, drafted: int, right: int) -> None:
        """Of `drafted` tokens the first `right` ones were; those behind the first wrong one say nothing."""
        self.right = self.fading * self.right + right
        self.seen = self.fading * self.seen + min(drafted, right + 1)

    def length(self, prices: Sequence[float]) -> int:
        """Tokens to draft where one that is right brings 1, and all of them together cost what `prices` says of one, of
        two, of three…"""
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
        """It has gone without long enough to be tried again."""
        return self.skipped >= self.patience

    def try_again(self) -> None:
        """With one token, and then not for longer."""
        self.patience, self.skipped = min(2 * self.patience, MOST_PATIENCE), 0


@dataclass(slots=True)
class Prices:
    """What steps of about so many rows take, in seconds: those without drafts, and how much more others took, each with
    the tokens that were drafted for it."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    drafted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    since_plain: int = 0
    met: set[int] = field(default_factory=set)  # lengths of drafts

    @property
    def token(self) -> float:
        """Seconds of a drafted token. A step with many of them tells it better than several with one, which are as
        likely to have taken less than a plain step as more."""
        each = sorted((seconds / count, count) for count, seconds in self.drafted)
        weights = list(accumulate(count for _, count in each))
        return max(0.0, each[bisect_left(weights, weights[-1] / 2)][0])

    def drafts(self, most: int, rows: int) -> list[float]:
        """Seconds of one drafted token of a row, of two… up to `most`. Of a row alone as measured, or what the next
        shorter draft makes likely: its next token may be the one for which each matrix is read once more."""
        token, found = self.token, []
        for count in range(1, most + 1):
            alike = [seconds for drafted, seconds in self.drafted if drafted == count] if rows == 1 else []
            if len(alike) >= LEAST:
                token = max(0.0, median_high(alike)) / count
            found.append(count * token)
        return found


class Switch:
    """Of one engine. `most`: tokens of a draft. `always`: it is never off, for comparisons and tests."""

    def __init__(self, most: int, *, always: bool = False):
        self.most = most
        self.always = always
        self._all = Odds(PRIOR, 1.0, fading=0.98)
        self._overdue: deque[float] = deque(maxlen=HISTORY)  # seconds of a token that had to be computed first
        self._prices: dict[int, Prices] = {}
        self._account = 0.0
        self._most_in_account = 0.0

    def odds(self) -> Odds:
        """Of a new request: as those of late, and as sure as these are of late."""
        seen = min(self._all.seen, TRUST)
        return Odds(self._all.rate * seen, seen)

    def note_draft(self, odds: Odds, drafted: int, right: int) -> None:
        """Of so many drafted tokens of a request the first `right` ones were."""
        for each in (odds, self._all):
            each.note(drafted, right)

    def lengths(self, odds: Sequence[Odds], dues: Sequence[int] = ()) -> list[int]:
        """How many tokens to draft for each request that decodes in the next step. dues: of each, the tokens that have
        to be computed first; none if nothing is said."""
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
            odds[again].try_again()  # one at a time: together they would cost as much as a step
            lengths[again] = 1
        return self._afford(lengths, dues)

    def _afford(self, lengths: list[int], dues: Sequence[int]) -> list[int]:
        """Without those of whom more is overdue than the account can pay for; the ones with the least come first."""
        price = median_high(self._overdue) if self._overdue else 0.0
        left = self._account
        for at in sorted(range(len(dues)), key=dues.__getitem__):
            if lengths[at] and dues[at]:
                left -= dues[at] * price
                lengths[at] = lengths[at] if left > 0 else 0
        return lengths

    def note_plain(self, rows: int, seconds: float) -> None:
        """A step in which `rows` requests decoded, and nothing else happened."""
        prices = self._of(rows)
        prices.plain.append(seconds)
        prices.since_plain = 0
        plain = median_high(prices.plain)
        if not self._most_in_account:
            self._account = START * plain
        self._most_in_account = BALANCE * plain
        self._earn(seconds)

    def note_drafted(self, rows: int, drafted: int, right: int, seconds: float, *, overdue: int = 0) -> None:
        """A step in which `right` of `drafted` tokens were; with what it took to draft them, and to compute `overdue`
        tokens first: where there are any, it says nothing about what a drafted token takes."""
        prices = self._of(rows)
        if not prices.plain:
            return
        plain = median_high(prices.plain)
        if rows == 1 and drafted and drafted not in prices.met:
            prices.met.add(drafted)  # a row alone has tapes, which the first step of each length records
            self._earn(seconds)
            return
        if drafted and not overdue:
            prices.drafted.append((drafted, seconds - plain))
        if overdue:
            expected = plain + (drafted * prices.token if prices.drafted else 0.0)
            self._overdue.append(max(0.0, seconds - expected) / overdue)
        # A step that took less than a plain one has fewer rows than those were of late, or luck.
        self._account -= max(0.0, seconds - plain) - plain * right / rows
        self._earn(seconds)

    def note_other(self, seconds: float) -> None:
        """A step in which prompts were computed."""
        self._earn(seconds)

    def _earn(self, seconds: float) -> None:
        self._account = min(self._account + SHARE * seconds, self._most_in_account)

    def _of(self, rows: int) -> Prices:
        """Alike are those of up to 1, 2, 4, 8 … rows."""
        return self._prices.setdefault((rows - 1).bit_length(), Prices())


def _trial(rows: int) -> list[int]:
    """Drafts that are too few to cost much, to learn what they cost."""
    return [int(row < max(1, rows // 4)) for row in range(rows)]
