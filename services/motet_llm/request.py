"""One request inside the engine: its tokens, its blocks, its credit and its clocks."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from enum import Enum

from motet_shared.messages import Sampling

Key = Hashable


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """State of one generation.

    `tokens` is prompt plus output; the first `num_computed` of them have their keys and values in `block_table`.
    Output that was emitted before a move counts as output in every respect but is not emitted again.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "credit",
        "deadline",
        "emitted",
        "first_token_at",
        "key",
        "max_length",
        "model_seconds",
        "num_computed",
        "num_prompt",
        "preemptions",
        "queued_at",
        "sampling",
        "started_at",
        "status",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        key: Key,
        arrival: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        output: Sequence[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        credit: int = 1 << 30,
        deadline: float | None = None,
        max_length: int,
    ):
        self.key = key
        self.arrival = arrival
        self.tokens = [*prompt, *output]
        self.num_prompt = len(prompt)
        self.sampling = sampling
        self.stop_ids = stop_ids
        self.credit = credit
        self.deadline = deadline
        self.max_length = max_length
        self.block_table: list[int] = []
        self.num_computed = 0
        self.emitted = 0
        self.preemptions = 0
        self.status = Status.WAITING
        self.queued_at = time.monotonic()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.model_seconds = 0.0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next one can be drawn: 1 while decoding, more while prefilling."""
        return len(self.tokens) - self.num_computed

    @property
    def paused(self) -> bool:
        """The caller has not yet asked for another item."""
        return self.emitted >= self.credit

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.max_length

    def timing(self, now: float) -> dict[str, float]:
        """Seconds from `add` to the first step, to the first token, to `now`; and this request's share of the model."""
        started = self.started_at or now
        first = self.first_token_at or now
        return {
            "queue": started - self.queued_at,
            "prefill": first - started,
            "decode": now - first,
            "model": self.model_seconds,
        }
