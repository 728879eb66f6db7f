"""Carry prompts between two engines without a wire: one has them computed by the other.

A seeded random schedule brings what they say late, in other company, broken off or damaged.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from motet_llm.disaggregation.kv_transfer import PackedPart
from motet_llm.disaggregation.placement import LocalPrefill
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.request import Key, Request
from motet_shared.messages import Sampling

ELSEWHERE = "prefill-1"
LONGEST = 60  # tokens of a prompt


class Elsewhere:
    """Have every prompt computed elsewhere that takes more than `least` tokens."""

    def __init__(self, least: int = 0):
        self._least = least

    def choose(self, request: Request, here: LocalPrefill, token_bytes: int) -> str | None:
        return ELSEWHERE if request.num_uncomputed > self._least else None

    def ended(self, key: Key, seconds: float | None) -> None:
        pass


@dataclass
class Job:
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    timing: dict[str, float] = field(default_factory=dict)

    def take(self, output: StepOutput) -> None:
        assert output.error is None
        assert self.finish is None
        self.ids += output.ids
        self.logprobs += [entry.logprob for entry in output.logprobs or []]
        self.finish, self.timing = output.finish, output.timing or {}


class Pair:
    """`here` has every prompt computed `there`; `seed` decides what happens in between."""

    def __init__(self, here: Engine, there: Engine, seed: int, faults: float = 0.0):
        self.here, self.there = here, there
        self.rng = random.Random(seed)
        self.faults = faults
        self.jobs: dict[int, Job] = {}
        self.wire: deque[tuple[int, PackedPart]] = deque()
        self.sent: dict[int, int] = {}  # outputs of `there`, by request that it computes

    def run(self, prompts: list[list[int]], answer: int = 12) -> list[Job]:
        waiting = list(enumerate(prompts))
        while waiting or not all(job.finish for job in self.jobs.values()):
            if waiting and self.rng.random() < 0.5:
                key, prompt = waiting.pop(0)
                self.jobs[key] = Job(prompt)
                self.here.add(
                    key,
                    prompt,
                    Sampling(temperature=0, max_tokens=answer, ignore_eos=True, logprobs=0),
                )
            self._step_here()
            self._step_there()
            self._carry()
            self.here.check_integrity()
            self.there.check_integrity()
        for key in list(self.sent):
            self._leave(key)
        for engine in (self.here, self.there):
            assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]
        return list(self.jobs.values())

    def _step_here(self) -> None:
        for output in self.here.step():
            key = int(str(output.key))
            if (handover := output.handover) is None:
                self.jobs[key].take(output)
            elif handover.instance:
                sampling = Sampling(max_tokens=1)
                self.there.add(
                    key, list(handover.tokens), sampling, send_from=handover.start, credit=2
                )
                self.sent[key] = 0
            else:
                self._leave(key)

    def _leave(self, key: int) -> None:
        """Nobody waits for it any more."""
        self.there.cancel(key)
        self.sent.pop(key, None)
        self.wire = deque((other, packed) for other, packed in self.wire if other != key)

    def _step_there(self) -> None:
        for output in self.there.step():
            key = int(str(output.key))
            self.wire.extend((key, packed) for packed in output.packed or [])
            self.sent[key] += 1
            self.there.grant(key, self.sent[key] + 2)

    def _carry(self) -> None:
        """Some of what is on its way arrives, or all that is of one request is lost."""
        for _ in range(self.rng.randint(0, 6)):
            if not self.wire:
                return
            key, packed = self.wire.popleft()
            part = packed.part
            if self.rng.random() < self.faults:
                if self.rng.random() < 0.5:
                    self._leave(key)
                    self.here.receiver.end(key, "worker_lost")
                    continue
                part = replace(part, first=part.first + 1)
            self.here.receiver.receive(key, part, packed.content, packed.dtype)


def alone(engine: Engine, prompts: list[list[int]], answer: int = 12) -> list[Job]:
    """What an engine says that computes everything itself."""
    jobs = {key: Job(prompt) for key, prompt in enumerate(prompts)}
    for key, job in jobs.items():
        engine.add(
            key, job.prompt, Sampling(temperature=0, max_tokens=answer, ignore_eos=True, logprobs=0)
        )
    while engine.has_work:
        for output in engine.step():
            jobs[int(str(output.key))].take(output)
    return list(jobs.values())


def prompts_of(rng: random.Random, vocab: int, count: int = 6) -> list[list[int]]:
    """Every second one begins as one before it."""
    prompts: list[list[int]] = []
    for _ in range(count):
        prompt = [rng.randrange(vocab - 3) for _ in range(rng.randint(1, LONGEST))]
        if prompts and rng.random() < 0.5:
            shared = rng.choice(prompts)[: rng.choice([7, 16, 33])]
            prompt = shared + prompt[len(shared) :]
        prompts.append(prompt)
    return prompts
