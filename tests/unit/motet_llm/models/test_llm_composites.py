"""Composite checkpoints are served as text, without their processors' files, as `generate` answers.

One family for each way in which a checkpoint holds its language model is in `make test`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import VOCAB
from support.engine.greedy import assert_greedy
from support.engine.schedules import Schedule, random_prompts
from support.families import composites
from support.families import language_families as families
from support.running.tiers import mostly_extended

# With a class of its own, with towers beside it, and within a class that has none for text.
MECHANISMS = ["internvl", "qwen3_vl_moe"]


@pytest.mark.parametrize("name", mostly_extended(composites.SERVED, MECHANISMS, "families"))
def test_text_is_what_generate_gives(name: str, tmp_path: Path) -> None:
    model = composites.random_model(name)
    model.save_pretrained(tmp_path)
    config = checkpoint.load_config(tmp_path)
    engine = Engine(
        EngineConfig(
            model=str(tmp_path),
            dtype="float32",
            threads=1,
            block_size=4,
            num_blocks=80,
            token_budget=8,
            max_running=4,
            context=0 if checkpoint.exact_range(config) else families.CONTEXT,
        )
    )
    jobs = Schedule([engine], 0, random_prompts(random.Random(0), VOCAB, 5)).run()
    assert any(job.ids for job in jobs)
    for job in jobs:
        assert_greedy(model, job)


def test_towers_are_not_loaded(tmp_path: Path) -> None:
    composites.random_model("internvl").save_pretrained(tmp_path)
    model = checkpoint.load_model(tmp_path, checkpoint.load_config(tmp_path), torch.float32)
    assert not [name for name, _ in model.named_parameters() if "vision" in name]


def test_a_missing_tensor_of_the_language_model_is_named(tmp_path: Path) -> None:
    model = composites.random_model("internvl")
    weights = {k: v for k, v in model.state_dict().items() if "layers.1.mlp.up_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match="up_proj"):
        checkpoint.load_model(tmp_path, checkpoint.load_config(tmp_path), torch.float32)


@pytest.mark.parametrize("name", composites.REFUSED)
def test_others_are_refused(name: str, tmp_path: Path) -> None:
    config_class, model_class = composites.composite_classes()[name]
    config = config_class()
    config.architectures = [model_class.__name__]
    with pytest.raises(ConfigError):
        checkpoint.check_config(config)
