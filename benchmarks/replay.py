"""Serves a trace of requests with an engine in this process, at the times at which they come, and notes every token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motet_llm.adapters.bank import Adapter
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.grammar.grammar import GrammarState
from motet_shared.errors import MotetError
from motet_shared.messages import Sampling
from motet_shared.quantiles import quantile


@dataclass(frozen=True, slots=True)
class Job:
    """A request that comes `arrival` seconds after the start and is left by its client after `output` tokens.

    limit: what it asks for as max_tokens, which is all that a server knows; 0: `output`.
    grammar_state: of the grammar that its reply is held to, for one replay. adapter: in the engine's bank.
    temperature: at which it is drawn.
    """

    arrival: float
    prompt: list[int]
    output: int
    limit: int = 0
    grammar_state: GrammarState | None = None
    adapter: Adapter | None = None
    temperature: float = 0.0


@dataclass(slots=True)
class Served:
    """The tokens of a job, and when they came, in seconds after the start. `error`: why there are no more."""

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
        """Inter-token latencies."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good answer keeps to, in seconds: time to first token, and 95th percentile of its inter-token latency."""

    ttft: float = 2.0
    itl: float = 0.15

    def met(self, served: Served) -> bool:
        return (
            served.complete
            and served.ttft <= self.ttft
            and (quantile(served.gaps, 0.95) if served.gaps else 0.0) <= self.itl
        )

    def lost(self, served: Served, now: float) -> bool:
        """Whether it cannot be good any more."""
        late = not served.times and now > served.job.arrival + self.ttft
        return bool(served.error) or late or (served.complete and not self.met(served))


def blocks_for(streams: int, tokens: int) -> int:
    """KV blocks of 16 tokens in which so many streams of so many tokens find room, and one more each."""
    return streams * (-(-tokens // 16) + 1)


def rate(served: Sequence[Served]) -> float:
    """Tokens per second, all together. Raises RuntimeError if a request was refused."""
    return sum(len(s.times) for s in _complete(served)) / max(s.times[-1] for s in served)


def decode_rate(served: Sequence[Served]) -> float:
    """Tokens per second from when all streams have their first one. Raises RuntimeError if a request was refused."""
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
    """One trace on one engine. `run` ends when all is served, or as soon as more than `bearable` jobs are lost."""

    def __init__(
        self, engine: Engine, jobs: Iterable[Job], limits: Limits | None = None, bearable: int = 0
    ):
        self.served = [Served(job) for job in sorted(jobs, key=lambda job: job.arrival)]
        self.given_up = False
        self._engine = engine
        self._limits = limits
        self._bearable = bearable
        self._pending = deque(enumerate(self.served))
        self._start = self._stopped = 0.0  # what its clock counts from, and when that stood still
        self._left: list[str] = []  # jobs whose clients have what they wanted

    def run(self) -> list[Served]:
        while self.goes_on:
            self.turn()
        self._end()
        return self.served

    @property
    def goes_on(self) -> bool:
        return not self.given_up and (bool(self._pending) or self._engine.has_work)

    def turn(self) -> None:
        """One step. The clock stands still between one and the next."""
        self._start += time.perf_counter() - self._stopped
        while self._pending and self._pending[0][1].job.arrival <= self._now():
            self._add(*self._pending.popleft())
        if self._engine.has_work:
            self._note(self._engine.step(self._note))
            self._leave()
        elif self._pending:
            time.sleep(max(0.0, self._pending[0][1].job.arrival - self._now()))
        self.given_up = self._too_many_lost()
        self._stopped = time.perf_counter()

    def _end(self) -> None:
        for index in range(len(self.served)):
            self._engine.cancel(str(index))
        while (
            self._engine.has_work
        ):  # tokens of the last step, which the next replay would take for its own
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

    def _note(self, outputs: Sequence[StepOutput]) -> None:
        now = self._now()
        for item in outputs:
            served = self.served[int(str(item.key))]
            if item.error is not None:
                served.error = item.error.message
            if not served.complete:
                served.times += [now] * len(item.ids)
                served.ids += item.ids
            if served.complete and item.finish is None and item.error is None:
                self._left.append(str(item.key))

    def _leave(self) -> None:
        """Between steps, as the engine wants it."""
        while self._left:
            self._engine.cancel(self._left.pop())

    def _too_many_lost(self) -> bool:
        if self._limits is None:
            return False
        now = self._now()
        return sum(self._limits.lost(served, now) for served in self.served) > self._bearable


def run_in_turn(one: Replay, other: Replay) -> tuple[list[Served], list[Served]]:
    """Both, a step of each in turn: whatever slows the machine down slows both. Each has what it took by itself.

    Their engines are to compute on this thread (`overlap=False`): the workers of two would be in each other's way.
    """
    order = [one, other]
    while any(replay.goes_on for replay in order):
        for replay in order:
            if replay.goes_on:
                replay.turn()
        order.reverse()
    return one.run(), other.run()
