"""Keep the last replies: latencies, and time by stage."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from motet_shared.quantiles import quantile

from .spans import spans

KEPT = 2000  # replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Describe a reply that has ended.

    ended: Unix time. first: seconds to the first token; None: there was none. total: seconds.
    status: finish status; "failed", or "left" if its client disconnected before the end.
    timing: seconds by `<role>.<stage>`.
    """

    ended: float
    request: str
    model: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first: float | None
    total: float
    moves: int
    timing: dict[str, float]

    @property
    def between(self) -> float | None:
        """Return the mean seconds between two tokens; None for fewer than two tokens."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.total - self.first) / (self.tokens - 1)

    def is_good(self, most_first: float, most_between: float) -> bool:
        """Return True if the reply ended well, with first token and gaps within these limits."""
        in_time = (
            self.first is not None
            and self.first <= most_first
            and (self.between or 0.0) <= most_between
        )
        return self.status not in ("failed", "left") and in_time

    def document(self) -> dict[str, Any]:
        return asdict(self) | {
            "between": self.between,
            "spans": [asdict(span) for span in spans(self.timing)],
        }


class Recent:
    """Keep the last replies, the newest at the end."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self.clock = clock
        self._replies: deque[Reply] = deque(maxlen=KEPT)

    def note(self, reply: Reply) -> None:
        self._replies.append(reply)

    def last(self, count: int, request: str = "") -> list[Reply]:
        """Return up to `count` replies, the newest first; only those of `request` if given."""
        found = (
            reply for reply in reversed(self._replies) if not request or reply.request == request
        )
        return [reply for reply, _ in zip(found, range(count), strict=False)]

    def since(self, time: float) -> list[Reply]:
        """Return the replies that have ended at `time` or later."""
        return [reply for reply in self._replies if reply.ended >= time]

    def summary(self, window: float, most_first: float, most_between: float) -> dict[str, Any]:
        """Summarize the last `window` seconds: rates, percentiles, and the share of good replies.

        Replies that their clients left count for no percentile and no share, as their end was not
        waited for.
        """
        ended = self.since(self.clock() - window)
        judged = [reply for reply in ended if reply.status != "left"]
        good = sum(reply.is_good(most_first, most_between) for reply in judged)
        return {
            "window_seconds": window,
            "replies": len(ended),
            "failed": sum(reply.status == "failed" for reply in judged),
            "replies_per_second": len(ended) / window,
            "tokens_per_second": sum(reply.tokens for reply in ended) / window,
            "first_token_seconds": percentiles(r.first for r in judged),
            "between_tokens_seconds": percentiles(r.between for r in judged),
            "good": good / len(judged) if judged else None,
        }


def percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return p50, p95 and p99 of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return {f"p{share}": quantile(known, share / 100) for share in (50, 95, 99)} if known else None
