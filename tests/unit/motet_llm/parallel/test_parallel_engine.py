"""A group's answers are those of one rank: ranks are threads of this process, connected by gloo.

Requests move between an engine of one rank and one of a group, at random: each goes on where the
other has stopped, and the whole answer is that of `transformers.generate`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from support.engine.greedy import assert_greedy
from support.engine.rank_threads import group_engine
from support.engine.schedules import Schedule, random_prompts
from support.families import language_families as families

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "num_blocks": 60,
    "token_budget": 16,
    "max_running": 6,
    "decode_slowdown": 0,
    "packed_cache": 0,
    "collective_timeout": 20.0,
}


def check_family(name: str, folder: Path, seed: int = 0, **degrees: int) -> None:
    families.write_checkpoint(name, folder)
    config = checkpoint.load_config(folder)
    context = 0 if checkpoint.exact_range(config) else families.CONTEXT
    settings = SMALL | {"model": str(folder), "context": context}
    reference = families.class_of(name).from_pretrained(folder, dtype=torch.float32).eval()
    alone = Engine(EngineConfig(**settings))
    with group_engine(EngineConfig(**settings, **degrees)) as group:
        prompts = random_prompts(random.Random(seed), config.vocab_size, 6)
        jobs = Schedule([group, group, alone], seed, prompts, answer=12).run()
        assert group.stats()["preemptions"] + alone.stats()["preemptions"] >= 0
    assert jobs
    for job in jobs:
        assert_greedy(reference, job)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("LlamaForCausalLM", {"tensor_parallel": 2}),
        ("Qwen3ForCausalLM", {"tensor_parallel": 4}),
        ("Qwen2ForCausalLM", {"pipeline_parallel": 2}),
        ("Qwen3MoeForCausalLM", {"expert_parallel": 2}),
        ("Qwen3MoeForCausalLM", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ],
)
def test_a_group_answers_as_generate_does(
    name: str, degrees: dict[str, int], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    check_family(name, tmp_path, **degrees)


def test_a_family_without_a_plan_is_refused_by_name(tmp_path: Path) -> None:
    families.write_checkpoint("GPT2LMHeadModel", tmp_path)
    config = EngineConfig(**SMALL, model=str(tmp_path), tensor_parallel=2)
    with (
        pytest.raises(ConfigError, match=r"tensor_parallel: .*gpt2.*base_model_tp_plan.*give 1"),
        group_engine(config),
    ):
        pass


def test_heads_that_ranks_cannot_share_are_refused_by_name(tmp_path: Path) -> None:
    families.write_checkpoint("LlamaForCausalLM", tmp_path)
    config = EngineConfig(**SMALL, model=str(tmp_path), tensor_parallel=3)
    with (
        pytest.raises(ConfigError, match=r"tensor_parallel=3: .*llama.*4 query and 2 key/value"),
        group_engine(config),
    ):
        pass
