"""Run seeded random schedules of engine requests: arrivals, stalled credit, cancels, moves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_shared.messages import Sampling

LONGEST_PROMPT, LONGEST_ANSWER = 40, 30  # tokens; windows and chunks of tiny models are shorter


@dataclass
class Job:
    """Hold a request and its result; `engine` is where it runs now."""

    prompt: list[int]
    sampling: Sampling
    engine: Engine
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    granted: int = 0
    items: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return self.finish is not None or self.cancelled


class Schedule:
    """Apply random events to two engines with the same weights until every job is done.

    tenants: of the jobs, in turn.
    """

    def __init__(
        self,
        engines: list[Engine],
        seed: int,
        prompts: list[list[int]] | None = None,
        answer: int = LONGEST_ANSWER,
        tenants: tuple[str, ...] = ("",),
    ):
        self.rng = random.Random(seed)
        self.engines = engines
        self.answer = answer
        self.tenants = tenants
        self.jobs: dict[int, Job] = {}
        self.prompts = prompts or random_prompts(self.rng, engines[0].card().vocab_size, 8)

    def run(self) -> list[Job]:
        while len(self.jobs) < len(self.prompts) or not all(job.done for job in self.jobs.values()):
            if len(self.jobs) < len(self.prompts) and self.rng.random() < 0.4:
                self._arrive()
            for key, job in self.jobs.items():
                if not job.done:
                    self._disturb(key, job)
            for engine in self.engines:
                for output in engine.step():
                    self._take(output, self.jobs[output.key])  # type: ignore[index]
                engine.check_integrity()
        for engine in self.engines:
            assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]
        return [job for job in self.jobs.values() if not job.cancelled]

    def _arrive(self) -> None:
        key = len(self.jobs)
        sampling = Sampling(temperature=0, max_tokens=self.rng.randint(1, self.answer), logprobs=0)
        self.jobs[key] = job = Job(self.prompts[key], sampling, self.rng.choice(self.engines))
        self._open(key, job)

    def _open(self, key: int, job: Job) -> None:
        job.items, job.granted = 0, self.rng.choice([0, 2, 1000])
        tenant = self.tenants[key % len(self.tenants)]
        job.engine.add(
            key, job.prompt, job.sampling, output=job.ids, credit=job.granted, tenant=tenant
        )

    def _disturb(self, key: int, job: Job) -> None:
        chance = self.rng.random()
        if chance < 0.15:
            job.granted += self.rng.randint(1, 8)
            job.engine.grant(key, job.granted)
        elif chance < 0.17:
            job.engine.cancel(key)
            self._move_or_end(key, job)

    def _move_or_end(self, key: int, job: Job) -> None:
        if self.rng.random() < 0.2:
            job.cancelled = True
        else:
            job.engine = self.rng.choice(self.engines)
            self._open(key, job)

    def _take(self, output: StepOutput, job: Job) -> None:
        assert output.error is None
        assert not job.done
        job.ids += output.ids
        job.logprobs += [entry.logprob for entry in output.logprobs or []]
        job.items += bool(output.ids)
        assert job.items <= job.granted
        job.finish = output.finish
        job.cached_tokens = output.usage.cached_tokens if output.usage else 0


def random_prompts(rng: random.Random, vocab: int, count: int) -> list[list[int]]:
    """Return prompts of which every second one repeats an earlier one or its prefix."""
    prompts: list[list[int]] = []
    for _ in range(count):
        prompt = [rng.randrange(vocab - 3) for _ in range(rng.randint(1, LONGEST_PROMPT))]
        if prompts and rng.random() < 0.5:
            shared = rng.choice(prompts)[: rng.choice([8, 16, 32, LONGEST_PROMPT])]
            prompt = shared + prompt[len(shared) :]
        prompts.append(prompt)
    return prompts
