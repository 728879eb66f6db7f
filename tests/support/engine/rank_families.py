"""Check the answers of a group of ranks, for one family: they are those of `transformers.generate`.

Requests move between the group and an engine of one rank, at random: each goes on where the other
has stopped.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.weights import checkpoint
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
    "collective_timeout": 60.0,
}


def check_family(name: str, folder: Path, seed: int = 0, **degrees: Any) -> None:
    """Write a tiny checkpoint of a family into `folder`, and compare. Raises ConfigError if it is refused."""
    families.write_checkpoint(name, folder)
    config = checkpoint.load_config(folder)
    context = 0 if checkpoint.exact_range(config) else families.CONTEXT
    settings = SMALL | {"model": str(folder), "context": context}
    reference = families.class_of(name).from_pretrained(folder, dtype=torch.float32).eval()
    alone = Engine(EngineConfig(**settings))
    with group_engine(EngineConfig(**settings, **degrees)) as group:
        prompts = random_prompts(random.Random(seed), config.vocab_size, 6)
        jobs = Schedule([group, group, alone], seed, prompts, answer=12).run()
    alone.close()
    assert jobs
    for job in jobs:
        assert_greedy(reference, job)
