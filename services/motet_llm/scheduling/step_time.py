"""Estimate how long steps take, from the times of the engine's own recent steps."""

from __future__ import annotations

import math
from collections import deque

HISTORY = 64  # steps
PER_CLASS = 16  # steps kept per class of row counts
MAX_MIXED_STEPS = 32  # most steps with prefill in a row before one without it measures decoding


class StepTimeEstimate:
    """Keep medians and minima over recent steps; all are 0 (or no limit) until steps were measured.

    The time of a step that only decodes depends on its rows, so times are kept by the row count's
    number of bits. While some request always prefills there are no such steps, so one is requested
    now and then (`needs_decode_sample`). Without it, the time of new streams would be attributed to the
    tokens prefilled beside them, until hardly any were prefilled.
    """

    def __init__(self) -> None:
        self._decode: dict[
            int, deque[float]
        ] = {}  # seconds of steps that only decode, by bits of the row count
        self._row_counts: dict[int, deque[int]] = {}  # rows of the steps in `_decode`
        self._rows: deque[float] = deque(maxlen=HISTORY)  # the same, divided by the rows
        self._prefill: deque[float] = deque(
            maxlen=HISTORY
        )  # seconds that a prefilled token added to its step
        self._mixed_in_a_row = (
            0  # steps that decoded and prefilled since the last that only decoded
        )

    def note(self, seconds: float, num_decodes: int, num_prefill_tokens: int) -> None:
        """Record a step that took `seconds`."""
        if not num_prefill_tokens:
            self._decode.setdefault(num_decodes.bit_length(), deque(maxlen=PER_CLASS)).append(
                seconds
            )
            self._row_counts.setdefault(num_decodes.bit_length(), deque(maxlen=PER_CLASS)).append(
                num_decodes
            )
            self._rows.append(seconds / max(1, num_decodes))
            self._mixed_in_a_row = 0
            return
        self._mixed_in_a_row += num_decodes > 0
        if num_prefill_tokens >= 4:  # with fewer, the step's own time dominates
            rest = seconds - (self.decode_step(num_decodes) if num_decodes else 0.0)
            self._prefill.append(max(rest, 0.05 * seconds) / num_prefill_tokens)

    def decode_step(self, rows: int) -> float:
        """Return the seconds of a step in which `rows` streams decode and no request prefills."""
        known = self._decode.copy()  # callable from any thread
        if not known:
            return 0.0
        return _median(known[min(known, key=lambda size: abs(size - rows.bit_length()))])

    def spare_rows(self, rows: int, slowdown: float) -> int:
        """Return how many rows may join a step of `rows` rows that may take `slowdown` as long.

        The seconds that a row adds are the slope between the smallest and the largest class of
        steps; 0 rows are spare as long as it is unknown, or not above 0.
        """
        known = sorted(self._decode.copy())
        if len(known) < 2:
            return 0
        low, high = known[0], known[-1]
        width = _median(self._row_counts[high]) - _median(self._row_counts[low])
        more = _median(self._decode[high]) - _median(self._decode[low])
        if width <= 0 or more <= 0:
            return 0
        return int((slowdown - 1) * self.decode_step(rows) * width / more)

    @property
    def decode_row(self) -> float:
        """Return the seconds of a step that only decodes, per row."""
        return _median(self._rows)

    @property
    def prefill_token(self) -> float:
        """Return the seconds that one more prefilled token takes."""
        return _median(self._prefill)

    def at_least(self, num_prefill: int, num_steps: int) -> float:
        """Return the seconds of these prefill tokens and decode steps at the best recent pace."""
        steps = [
            seconds for same_class in self._decode.copy().values() for seconds in same_class.copy()
        ]
        return min(self._prefill, default=0.0) * num_prefill + min(steps, default=0.0) * num_steps

    def needs_decode_sample(self, rows: int) -> bool:
        """Return True if the next step, of `rows` streams, should only decode, to be measured."""
        is_new = bool(self._decode) and rows.bit_length() not in self._decode
        return self._mixed_in_a_row >= (1 if is_new else MAX_MIXED_STEPS)

    def chunk(self, rows: int, slowdown: float, goal: float = 0.0) -> float:
        """Return the tokens that may be prefilled in a step while `rows` streams decode.

        The step may take `slowdown` times one without prefill, or `goal` seconds, whichever is
        longer.
        """
        if not (self._decode and self._prefill):
            return math.inf
        alone = self.decode_step(rows)
        return (max(slowdown * alone, goal) - alone) / self.prefill_token


def _median(values: deque[float] | deque[int]) -> float:
    ordered = sorted(values.copy())  # callable from any thread
    return ordered[len(ordered) // 2] if ordered else 0.0
