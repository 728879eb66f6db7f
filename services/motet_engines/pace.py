"""Measure a host's engine from outside: queues, times of first tokens, and times between tokens.

These are the figures of decode's heartbeats by which routers choose an instance.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from motet_shared.messages import TIERS

_HISTORY = 64  # requests, or gaps between tokens


class Pace:
    """Count requests and tokens, and keep the recent times."""

    def __init__(self) -> None:
        self.tokens = 0  # prompts and replies, since the start
        self.last_request = time.monotonic()  # when a request last began or ended
        self._prefilling: dict[str, tuple[int, int]] = {}  # key: prompt tokens, priority
        self._decoding = 0
        self._prefill: deque[float] = deque(maxlen=_HISTORY)  # seconds per token of a prompt
        self._rows: deque[float] = deque(maxlen=_HISTORY)  # seconds per token and running reply

    def load(self) -> dict[str, float]:
        """Return the load of the instance, as decode's heartbeats have it."""
        waiting = list(self._prefilling.values())
        return {
            "running": float(self._decoding),
            "queued": float(len(waiting)),
            "batch": float(self._decoding),
            "tokens": float(self.tokens),
            "prefill_token": _median(self._prefill),
            "decode_row": _median(self._rows),
            **{
                f"prefill_{name}": float(sum(n for n, priority in waiting if priority >= least))
                for name, least in TIERS.items()
            },
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError unless all requests have left."""
        if self._prefilling or self._decoding:
            raise RuntimeError(
                f"{len(self._prefilling)} requests are prefilled and {self._decoding} decode,"
                " but no call is active"
            )


class Measured:
    """Follow one request through a `Pace`: enter, `note` each output, leave."""

    def __init__(self, pace: Pace, key: str, prompt_tokens: int, priority: int):
        self._pace, self._key, self._prompt = pace, key, prompt_tokens
        self._priority = priority
        self._began = self._last = 0.0
        self._decodes = False
        self.prefill_seconds = 0.0  # until the first token; 0: there was none yet

    def __enter__(self) -> Measured:
        self._began = self._last = self._pace.last_request = time.monotonic()
        self._pace._prefilling[self._key] = (self._prompt, self._priority)
        return self

    def note(self, tokens: int, cached: int) -> None:
        """Record an output of `tokens`; `cached` tokens of the prompt were in the engine's cache."""
        now, pace = time.monotonic(), self._pace
        pace.tokens += tokens
        if not self._decodes:
            del pace._prefilling[self._key]
            self._decodes = True
            self.prefill_seconds = now - self._began
            pace._decoding += 1
            pace.tokens += self._prompt
            if (computed := self._prompt - max(cached, 0)) > 0:
                pace._prefill.append((now - self._began) / computed)
        elif tokens:
            pace._rows.append((now - self._last) / tokens / max(pace._decoding, 1))
        self._last = now

    def restart_clock(self) -> None:
        """Leave out the time until now: the caller did not read."""
        self._last = time.monotonic()

    def timing(self) -> dict[str, float]:
        """Return the seconds until the first token, and since then."""
        total = time.monotonic() - self._began
        prefill = self.prefill_seconds or total
        return {"decode.prefill": prefill, "decode.decode": total - prefill}

    def __exit__(self, *exc: object) -> None:
        self._pace.last_request = time.monotonic()
        if self._decodes:
            self._pace._decoding -= 1
        else:
            self._pace._prefilling.pop(self._key, None)


def _median(values: deque[float]) -> float:
    return statistics.median(values) if values else 0.0
