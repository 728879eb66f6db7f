"""Model an engine's speed for the simulator."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from motet_shared.errors import ConfigError

Steps = Sequence[tuple[int, float]]

# The engine's default: prefill stretches a decode step to 1.8 times its length (`decode_slowdown`).
PREFILL_SHARE = 1 - 1 / 1.8


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Model the speed and limits of an instance.

    prefill_token: seconds per token of a prompt that is not cached.
    steps: (sequences, seconds) of a decode step, ascending; interpolated linearly, and extrapolated
        beyond the last by the last two.
    max_running: most sequences at a time.
    kv_tokens: capacity of the cache, prompts and replies together; 0: unlimited.
    prefill_share: of the time, for prefill while sequences decode; 0: both run at full speed.
    overhead: seconds that a request takes to the engine and back.
    cached: share of prompt tokens that a prefix cache has.
    """

    prefill_token: float
    steps: Steps
    max_running: int = 64
    kv_tokens: int = 0
    prefill_share: float = PREFILL_SHARE
    overhead: float = 0.0
    cached: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.steps]
        wrong = not sizes or sizes[0] < 1 or any(a >= b for a, b in itertools.pairwise(sizes))
        if wrong or not all(0 < seconds < math.inf for _, seconds in self.steps):
            raise ConfigError(
                f"steps={self.steps!r}: give rising numbers of sequences with seconds, such as [[1, 0.01], [64, 0.03]]",
                param="steps",
            )
        for name, low, below in (
            ("prefill_token", 0, math.inf),
            ("prefill_share", 0, 1),
            ("cached", 0, 1),
        ):
            if not low <= getattr(self, name) < below:
                raise ConfigError(
                    f"{name}={getattr(self, name):g}: give at least {low} and less than {below:g}",
                    param=name,
                )
        if self.max_running < 1:
            raise ConfigError(
                f"max_running={self.max_running}: give at least 1", param="max_running"
            )

    def step(self, sequences: int) -> float:
        """Return the seconds of a step that decodes `sequences`."""
        before = self.steps[0]
        if sequences <= before[0] or len(self.steps) == 1:
            return before[1]
        rest = self.steps[1:]
        after = next((point for point in rest if point[0] >= sequences), rest[-1])
        before = self.steps[self.steps.index(after) - 1]
        slope = (after[1] - before[1]) / (after[0] - before[0])
        return max(before[1] + slope * (sequences - before[0]), 1e-9)

    def table(self) -> list[float]:
        """Return `step` for 0 sequences (as for one) to `max_running`."""
        return [self.step(max(1, count)) for count in range(self.max_running + 1)]

    def sequences_within(self, itl: float) -> int:
        """Return the most sequences with which a step takes at most `itl` seconds, 0 if none."""
        fitting = [count for count in range(1, self.max_running + 1) if self.step(count) <= itl]
        return fitting[-1] if fitting else 0
