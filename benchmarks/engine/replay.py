"""Replay a trace of requests on an engine in this process and record the time of every token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.grammar.grammar import GrammarState
from motet_shared.errors import MotetError
from motet_shared.messages import Sampling
from motet_shared.quantiles import quantile


@dataclass(frozen=True, slots=True)
class Job:
    """Define a request that arrives after `arrival` seconds and is cancelled after `output` tokens.

    limit: max_tokens of the request, which is all that a server knows; 0: `output`. grammar_state:
    state of the grammar of its reply, for one replay. adapter: adapter in the engine's bank.
    """

    arrival: float
    prompt: list[int]
    output: int
    limit: int = 0
    grammar_state: GrammarState | None = None
    adapter: ResidentAdapter | None = None
    temperature: float = 0.0


@dataclass(slots=True)
class Served:
    """Hold the tokens of a job and their times, in seconds after the start.

    error: message of the error that ended it; empty: none.
    """

    job: Job
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def complete(self) -> bool:
        return len(self.times) >= self.job.output

    @property
    def ttft(self) -> float:
        return self.times[0] - self.job.arrival if self.times else float("inf")

    @property
    def gaps(self) -> list[float]:
        """Return the inter-token latencies."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Hold the limits of a good reply in seconds: time to first token, and p95 of its ITL."""

    ttft: float = 2.0
    itl: float = 0.15

    def met(self, served: Served) -> bool:
        return (
            served.complete
            and served.ttft <= self.ttft
            and (quantile(served.gaps, 0.95) if served.gaps else 0.0) <= self.itl
        )

    def lost(self, served: Served, now: float) -> bool:
        """Return True if the reply cannot be good any more."""
        late = not served.times and now > served.job.arrival + self.ttft
        return bool(served.error) or late or (served.complete and not self.met(served))


def blocks_for(streams: int, tokens: int) -> int:
    """Return the KV blocks of 16 tokens for `streams` streams of `tokens`, with one extra each."""
    return streams * (-(-tokens // 16) + 1)


def rate(served: Sequence[Served]) -> float:
    """Return tokens per second of all jobs. Raises RuntimeError if a request failed."""
    return sum(len(s.times) for s in _complete(served)) / max(s.times[-1] for s in served)


def decode_rate(served: Sequence[Served]) -> float:
    """Return tokens/s from the time of the last first token. Raises RuntimeError on failure."""
    start = max(s.times[0] for s in _complete(served))
    end = max(s.times[-1] for s in served)
    return sum(time > start for s in served for time in s.times) / (end - start)


def _complete(served: Sequence[Served]) -> Sequence[Served]:
    for one in served:
        if not one.complete:
            raise RuntimeError(
                f"a request ended after {len(one.ids)} tokens: {one.error or 'for no given reason'}"
            )
    return served


class Replay:
    """Replay a trace on an engine, until all is served or more than `max_lost` jobs are lost."""

    def __init__(
        self, engine: Engine, jobs: Iterable[Job], limits: Limits | None = None, max_lost: int = 0
    ):
        self.served = [Served(job) for job in sorted(jobs, key=lambda job: job.arrival)]
        self.aborted = False
        self._engine = engine
        self._limits = limits
        self._max_lost = max_lost
        self._pending = deque(enumerate(self.served))
        self._start = self._stopped = 0.0  # start of the clock, and when it was last stopped
        self._finished: list[str] = []  # jobs whose output is complete

    def run(self) -> list[Served]:
        while self.running:
            self.step()
        self._drain()
        return self.served

    @property
    def running(self) -> bool:
        return not self.aborted and (bool(self._pending) or self._engine.has_work)

    def step(self) -> None:
        """Run one step; the clock is stopped between steps."""
        self._start += time.perf_counter() - self._stopped
        while self._pending and self._pending[0][1].job.arrival <= self._now():
            self._add(*self._pending.popleft())
        if self._engine.has_work:
            self._record(self._engine.step(self._record))
            self._cancel_finished()
        elif self._pending and not self._engine.take_memory():  # as its service does while idle
            time.sleep(max(0.0, self._pending[0][1].job.arrival - self._now()))
        self.aborted = self._is_aborted()
        self._stopped = time.perf_counter()

    def _drain(self) -> None:
        for index in range(len(self.served)):
            self._engine.cancel(str(index))
        while self._engine.has_work:  # or the next replay would receive tokens of the last step
            self._engine.step()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _add(self, index: int, served: Served) -> None:
        job = served.job
        limit = job.limit or job.output
        sampling = Sampling(
            max_tokens=limit, temperature=job.temperature, seed=index, ignore_eos=True
        )
        try:
            self._engine.add(
                str(index),
                job.prompt,
                sampling,
                grammar_state=job.grammar_state,
                adapter=job.adapter,
            )
        except MotetError as error:
            served.error = error.message

    def _record(self, outputs: Sequence[StepOutput]) -> None:
        now = self._now()
        for item in outputs:
            served = self.served[int(str(item.key))]
            if item.error is not None:
                served.error = item.error.message
            if not served.complete:
                served.times += [now] * len(item.ids)
                served.ids += item.ids
            if served.complete and item.finish is None and item.error is None:
                self._finished.append(str(item.key))

    def _cancel_finished(self) -> None:
        """Cancel jobs whose output is complete, between two steps as the engine requires."""
        while self._finished:
            self._engine.cancel(self._finished.pop())

    def _is_aborted(self) -> bool:
        if self._limits is None:
            return False
        now = self._now()
        return sum(self._limits.lost(served, now) for served in self.served) > self._max_lost


# Settings of engines whose steps take turns: they compute on this thread, because two worker threads
# would compete for cores.
IN_TURN: dict[str, Any] = {"overlap": False}


def reserve_half(engine: Engine, half: int) -> None:
    """Allocate one half of the blocks, 0 or 1, to leave it to another engine on the same memory."""
    engine.pool.free(engine.pool.allocate(engine.pool.num_blocks)[half::2])


def run_in_turn(one: Replay, other: Replay) -> tuple[list[Served], list[Served]]:
    """Run both by alternating steps, so that other load slows both; each has a clock of its own.

    Their engines have the settings `IN_TURN`.
    """
    order = [one, other]
    while any(replay.running for replay in order):
        for replay in order:
            if replay.running:
                replay.step()
        order.reverse()
    return one.run(), other.run()
