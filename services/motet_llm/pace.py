"""How fast the engine is: measured on its own steps, asked when it plans the next ones."""

from __future__ import annotations

import math
from collections import deque

HISTORY = 64  # steps
ALIKE = 16  # steps that decode about as many rows
LOOK = 32  # steps with prefilling in a row, at most, until one without it tells what decoding takes by now


class Pace:
    """Medians and minima over recent steps. All answers are 0 (or no limit) until there is something to go by.

    What a step takes that only decodes depends on its rows: it is kept by their number, doubling. While somebody
    prefills all the time there are no such steps; then one is asked for now and then (`wants_to_look`). Without, what
    new streams take would be laid to the tokens that are prefilled beside them, until hardly any were.
    """

    def __init__(self) -> None:
        self._decode: dict[int, deque[float]] = {}  # seconds of steps that only decode
        self._rows: deque[float] = deque(maxlen=HISTORY)  # the same, by row
        self._prefill: deque[float] = deque(maxlen=HISTORY)  # seconds that a prefilled token added to its step
        self._unseen = 0  # steps that decoded and prefilled since the last that only decoded

    def note(self, seconds: float, num_decodes: int, num_prefill_tokens: int) -> None:
        """A step took `seconds`."""
        if not num_prefill_tokens:
            self._decode.setdefault(num_decodes.bit_length(), deque(maxlen=ALIKE)).append(seconds)
            self._rows.append(seconds / max(1, num_decodes))
            self._unseen = 0
            return
        self._unseen += num_decodes > 0
        if num_prefill_tokens >= 4:  # fewer say more about the step than about the token
            rest = seconds - (self.decode_step(num_decodes) if num_decodes else 0.0)
            self._prefill.append(max(rest, 0.05 * seconds) / num_prefill_tokens)

    def decode_step(self, rows: int) -> float:
        """Seconds of a step in which so many streams decode and nobody prefills."""
        known = self._decode.copy()  # from any thread
        if not known:
            return 0.0
        return _median(known[min(known, key=lambda size: abs(size - rows.bit_length()))])

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
        steps = [seconds for alike in self._decode.copy().values() for seconds in alike.copy()]
        return min(self._prefill, default=0.0) * num_prefill + min(steps, default=0.0) * num_steps

    def wants_to_look(self, rows: int) -> bool:
        """Whether the next step, of so many streams, had better be without prefilling."""
        is_new = bool(self._decode) and rows.bit_length() not in self._decode
        return self._unseen >= (1 if is_new else LOOK)

    def chunk(self, rows: int, slowdown: float, goal: float = 0.0) -> float:
        """Tokens to prefill while `rows` decode: a step may take `slowdown` times one without, or `goal` seconds.

        The longer of the two.
        """
        if not (self._decode and self._prefill):
            return math.inf
        alone = self.decode_step(rows)
        return (max(slowdown * alone, goal) - alone) / self.prefill_token


def _median(values: deque[float]) -> float:
    ordered = sorted(values.copy())  # from any thread
    return ordered[len(ordered) // 2] if ordered else 0.0
