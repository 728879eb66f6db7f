"""Greedy tokens equal `transformers.generate`, whatever happens to a request on the way.

A seeded random schedule of arrivals, small budgets, small pools (preemptions), stalled credit, cancels, moves from one
engine to another, and prompts that begin as others do (prefix hits), for every class that docs/models.md calls exact.
Where the reference's two best logits differ by less than 1e-4 either token is right, and the reference goes on from
ours.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from list_models import PAGE, exact_on, page
from motet_llm.attention.options import Reach
from motet_llm.attention.paged import StepLayout
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.request import Request
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_llm.weights import checkpoint
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.engine.greedy import assert_greedy
from support.engine.schedules import LONGEST_ANSWER, LONGEST_PROMPT, Schedule, random_prompts
from support.families import language_families as families
from support.running.tiers import mostly_long

SCHEDULES = int(os.environ.get("MOTET_SCHEDULES", "1"))  # long ones for every family

POCKET_CHAT = Path(__file__).parents[4] / "models" / "pocket-chat"
# With a cache, `generate` of Llama mixes keys of both sets of factors (test_llm_rope.py).
EXACT = [*exact_on(PAGE.read_text()), *sorted(families.VARIANTS.keys() - {"llama, longrope"})]
# One family for each mechanism of a layer: plain, biases, windows, caps, sinks, experts, latent attention, gated and
# recurrent mixers, positions that are learned or scaled, parallel residuals.
MECHANISMS = """LlamaForCausalLM Qwen2ForCausalLM MistralForCausalLM Gemma2ForCausalLM GptOssForCausalLM
    Qwen3MoeForCausalLM DeepseekV3ForCausalLM Qwen3NextForCausalLM FalconH1ForCausalLM Lfm2ForCausalLM
    KimiLinearForCausalLM GPT2LMHeadModel PhiForCausalLM CohereForCausalLM Llama4ForCausalLM Gemma3nForCausalLM
    ModernBertDecoderForCausalLM ZambaForCausalLM""".split()


def random_engine(folder: Path, rng: random.Random) -> Engine:
    """With a pool that is small, but holds the longest request."""
    block_size = rng.choice([1, 4, 16])
    token_budget = rng.choice([3, 8, 64])
    tokens = rng.choice([80, 160])
    max_running = rng.randint(2, token_budget)
    context = 0 if checkpoint.exact_range(checkpoint.load_config(folder)) else families.CONTEXT
    for more in (1, 2, 4, 8):
        engine = Engine(
            EngineConfig(
                model=str(folder),
                dtype="float32",
                threads=1,
                block_size=block_size,
                num_blocks=-(-tokens // block_size) * more,
                token_budget=token_budget,
                max_running=max_running,
                context=context,
                decode_slowdown=0,  # it goes by the clock, and this must come out the same every time
            )
        )
        if engine.context >= LONGEST_PROMPT + LONGEST_ANSWER:
            break
        engine.close()
    return engine


def check_schedule(folder: Path, reference: PreTrainedModel, seed: int, **options: Any) -> None:
    rng = random.Random(seed)
    jobs = Schedule([random_engine(folder, rng) for _ in range(2)], seed, **options).run()
    assert jobs
    for job in jobs:
        assert_greedy(reference, job)


@pytest.fixture(scope="module", params=mostly_long(EXACT, MECHANISMS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    torch.set_num_threads(1)
    folder = families.write_checkpoint(request.param, tmp_path_factory.mktemp("family"))
    return folder, families.class_of(request.param).from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def test_every_exact_family_answers_as_generate_does(family: tuple[Path, PreTrainedModel]) -> None:
    folder, reference = family
    prompts = random_prompts(random.Random(5), checkpoint.load_config(folder).vocab_size, 5)
    check_schedule(folder, reference, 0, prompts=prompts, answer=12)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("LlamaForCausalLM", {}),
        ("MistralForCausalLM", {"reach": Reach(families.WINDOW + 1)}),
        ("Gemma2ForCausalLM", {"softcap": None}),
        ("GptOssForCausalLM", {"sinks_H": None}),
    ],
)
def test_what_is_wrong_is_noticed(
    name: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny models must be sensitive enough: one token more in the window, a scale that is off by two percent."""
    read: Any = StepLayout._attend_rotated

    def read_wrongly(
        self: StepLayout, layer: int, query: torch.Tensor, scale: float, options: Any
    ) -> Any:
        return read(
            self, layer, query, scale if change else scale * 1.02, replace(options, **change)
        )

    folder = families.write_checkpoint(name, tmp_path)
    monkeypatch.setattr(StepLayout, "_attend_rotated", read_wrongly)
    with pytest.raises(AssertionError):
        check_schedule(folder, reference_of(folder), 0, answer=12)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + SCHEDULES))
@pytest.mark.parametrize(
    "family",
    [
        name
        if name in MECHANISMS[::4]
        else pytest.param(name, marks=pytest.mark.extended("conformance"))
        for name in EXACT
    ],
    indirect=True,
)
def test_every_exact_family_answers_as_generate_does_at_length(
    family: tuple[Path, PreTrainedModel], seed: int
) -> None:
    check_schedule(*family, seed)


@pytest.mark.extended("families")
@pytest.mark.slow
def test_the_page_of_families_is_current() -> None:
    text = page()
    assert text == PAGE.read_text(), "run scripts/list_models.py"
    assert len(exact_on(text)) >= 60


@pytest.mark.parametrize(("name", "num_blocks"), [("llama", 20), ("qwen3", 20), ("mistral", 12)])
def test_the_schedules_preempt_and_share_prefixes(
    name: str, num_blocks: int, tmp_path: Path
) -> None:
    """The property above is worth something only if its events happen."""
    folder = tiny_checkpoint(name, tmp_path)
    engine = Engine(
        EngineConfig(
            model=str(folder),
            threads=1,
            block_size=4,
            num_blocks=num_blocks,
            token_budget=16,
            max_running=8,
            decode_slowdown=0,
        )
    )
    jobs = Schedule([engine], 1).run()
    assert engine.stats()["preemptions"] > 0
    assert any(job.cached_tokens for job in jobs)
    for job in jobs:
        assert_greedy(reference_of(folder), job)


def test_streams_that_rest_for_another_tenant_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[Request] = []
    leave_out = Scheduler._leave_out

    def spied(scheduler: Scheduler, request: Request) -> None:
        rests.append(request)
        leave_out(scheduler, request)

    monkeypatch.setattr(Scheduler, "_leave_out", spied)
    monkeypatch.setattr(
        StepTimeEstimate, "decode_step", lambda pace, rows: 0.01 * rows
    )  # whatever the clock says
    monkeypatch.setattr(StepTimeEstimate, "chunk", lambda *_: 64)
    folder = tiny_checkpoint("llama", tmp_path)
    engine = Engine(
        EngineConfig(
            model=str(folder),
            threads=1,
            block_size=4,
            num_blocks=100,
            token_budget=64,
            max_running=8,
        )
    )
    prompts = random_prompts(random.Random(7), engine.card().vocab_size, 24)
    jobs = Schedule([engine], 7, prompts, tenants=("a", "a", "a", "b", "a", "a", "c")).run()
    assert engine.stats()["preemptions"] == 0
    assert len(rests) > 8
    for job in jobs:
        assert_greedy(reference_of(folder), job)


@cache
def reference_of(folder: Path) -> PreTrainedModel:
    reads_images = folder == POCKET_CHAT
    kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


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
    prompts = [
        tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=False)
        for t in talks
    ]
    rng = random.Random(seed)
    jobs = Schedule([random_engine(POCKET_CHAT, rng) for _ in range(2)], seed, prompts).run()
    assert any(job.finish == "stop" for job in jobs)
    for job in jobs:
        assert_greedy(reference_of(POCKET_CHAT), job)
