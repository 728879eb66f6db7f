"""Greedy tokens equal `transformers.generate`, whatever happens to a request on the way.

A seeded random schedule of arrivals, small budgets, small pools (preemptions), stalled credit, cancels and moves from
one engine to another. Where the reference's two best logits differ by less than 1e-4 either token is right, and the
reference goes on from ours.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from checkpoints import FAMILIES, tiny_checkpoint
from motet_llm.config import EngineConfig
from motet_llm.engine import Engine, StepOutput
from motet_shared.messages import Sampling

TIE = 1e-4
POCKET_CHAT = Path(__file__).parents[2] / "models" / "pocket-chat"


@dataclass
class Job:
    """A request and what came of it. `engine` is where it lives now."""

    prompt: list[int]
    sampling: Sampling
    engine: Engine
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    granted: int = 0
    items: int = 0
    finish: str | None = None
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return self.finish is not None or self.cancelled


class Schedule:
    """Plays random events against two engines with the same weights, until every job is done."""

    def __init__(self, engines: list[Engine], seed: int, prompts: list[list[int]] | None = None):
        self.rng = random.Random(seed)
        self.engines = engines
        self.jobs: dict[int, Job] = {}
        self.prompts = prompts or [self._prompt() for _ in range(8)]

    def _prompt(self) -> list[int]:
        vocab = self.engines[0].card().vocab
        return [self.rng.randrange(vocab - 3) for _ in range(self.rng.randint(1, 40))]

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
        sampling = Sampling(temperature=0, max_tokens=self.rng.randint(1, 30), logprobs=0)
        self.jobs[key] = job = Job(self.prompts[key], sampling, self.rng.choice(self.engines))
        self._open(key, job)

    def _open(self, key: int, job: Job) -> None:
        job.items, job.granted = 0, self.rng.choice([0, 2, 1000])
        job.engine.add(key, job.prompt, job.sampling, output=job.ids, credit=job.granted)

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


@torch.inference_mode()
def assert_greedy(reference: PreTrainedModel, job: Job) -> None:
    """`job.ids` is what `generate` gives, ties apart, and its log-probabilities are the reference's."""
    eos = reference.generation_config.eos_token_id
    eos = eos if isinstance(eos, int) else eos[0]
    ours = job.ids + ([eos] if job.finish == "stop" else [])
    logits: list[torch.Tensor] = []
    while len(logits) < len(ours):
        made = len(logits)
        prompt = torch.tensor([job.prompt + ours[:made]])
        result = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(ours) - made,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        theirs = result.sequences[0, prompt.shape[1] :].tolist()
        same = next((i for i, (a, b) in enumerate(zip(theirs, ours[made:], strict=False)) if a != b), len(theirs))
        logits += [step[0].float() for step in result.logits[: same + 1]]
        if same < len(theirs):
            best = logits[-1].topk(2)
            assert best.indices[1] == ours[made + same]
            assert best.values[0] - best.values[1] < TIE
    expected = [float(row.log_softmax(-1)[token]) for row, token in zip(logits, job.ids, strict=False)]
    assert job.logprobs == pytest.approx(expected, abs=1e-4)
    assert job.finish == "stop" or len(job.ids) == job.sampling.max_tokens


def random_config(folder: Path, rng: random.Random) -> EngineConfig:
    block_size = rng.choice([1, 4, 16])
    token_budget = rng.choice([3, 8, 64])
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        threads=1,
        block_size=block_size,
        num_blocks=-(-rng.choice([80, 160]) // block_size),
        token_budget=token_budget,
        max_running=rng.randint(2, token_budget),
    )


@cache
def reference_of(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("seed", range(4))
def test_greedy_equals_generate_under_a_random_schedule(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    engines = [Engine(random_config(folder, rng)) for _ in range(2)]
    jobs = Schedule(engines, seed).run()
    assert jobs
    for job in jobs:
        assert_greedy(reference_of(folder), job)


def test_the_schedules_preempt_and_move(folder: Path) -> None:
    """The property above is worth something only if its events happen."""
    engine = Engine(
        EngineConfig(model=str(folder), threads=1, block_size=4, num_blocks=20, token_budget=8, max_running=8)
    )
    jobs = Schedule([engine], 1).run()
    assert engine.stats()["preemptions"] > 0
    for job in jobs:
        assert_greedy(reference_of(folder), job)


TALK = [
    "Hello!",
    "What can you do?",
    "What is seven plus eight?",
    "Draw two red circles and a blue square.",
    "There is a large green star left of a small yellow triangle. What is left of the triangle?",
    "Count to twenty.",
    "There are a red circle, a blue square and a small purple star. Describe the scene.",
    "Who won the election?",
]


@pytest.mark.parametrize("seed", range(2))
def test_pocket_chat_answers_as_generate_does(seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET_CHAT)
    talks = [[{"role": "user", "content": text}] for text in TALK]
    prompts = [tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False) for t in talks]
    rng = random.Random(seed)
    engines = [Engine(random_config(POCKET_CHAT, rng)) for _ in range(2)]
    jobs = Schedule(engines, seed, prompts).run()
    assert any(job.finish == "stop" for job in jobs)
    for job in jobs:
        assert_greedy(reference_of(POCKET_CHAT), job)
