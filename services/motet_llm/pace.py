"""How fast the engine is: measured on its own steps, asked when it plans the next ones."""

from __future__ import annotations

import math
from collections import deque

HISTORY = 64


class Pace:
    """Medians and minima over recent steps. All answers are 0 (or no limit) until there is something to go by."""

    def __init__(self) -> None:
        self._decode: deque[float] = deque(maxlen=HISTORY)  # seconds of steps that only decode
        self._rows: deque[float] = deque(maxlen=HISTORY)  # the same, by row
        self._prefill: deque[float] = deque(maxlen=HISTORY)  # seconds that a prefilled token added to its step

    def note(self, seconds: float, num_decodes: int, num_prefill_tokens: int) -> None:
        """A step took `seconds`."""
        if not num_prefill_tokens:
            self._decode.append(seconds)
            self._rows.append(seconds / max(1, num_decodes))
        elif num_prefill_tokens >= 4:  # fewer say more about the step than about the token
            rest = seconds - (self.decode_step if num_decodes else 0.0)
            self._prefill.append(max(rest, 0.05 * seconds) / num_prefill_tokens)

    @property
    def decode_step(self) -> float:
        """Seconds of a step in which nobody prefills."""
        return _median(self._decode)

    @property
    def decode_row(self) -> float:
        """The same, shared out among the rows that decode."""
        return _median(self._rows)

    @property
    def prefill_token(self) -> float:
        """Seconds that one more prefilled token takes."""
        return _median(self._prefill)

    def at_least(self, num_prefill: int, num_steps: int) -> float:
        """Seconds that so many prefilled tokens and decode steps take at the best pace seen of late."""
        prefill = min(self._prefill, default=0.0) * num_prefill
        return prefill + min(self._decode, default=0.0) * num_steps

    def chunk(self, slowdown: float, goal: float = 0.0) -> float:
        """Tokens to prefill in a step: it may take `slowdown` times one that only decodes, or `goal` seconds.

        The longer of the two.
        """
        if not (self._decode and self._prefill):
            return math.inf
        longest = max(slowdown * self.decode_step, goal)
        return (longest - self.decode_step) / self.prefill_token


def _median(values: deque[float]) -> float:
    ordered = sorted(values.copy())  # from any thread
    return ordered[len(ordered) // 2] if ordered else 0.0
