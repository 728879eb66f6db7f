"""Keys and values of all ranks are handed over as those of one: groups of any size compute for each other."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from support.engine.handovers import Elsewhere, Pair, alone, prompts_of
from support.engine.rank_threads import group_engine
from support.families import language_families as families

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "num_blocks": 400,
    "token_budget": 16,
    "max_running": 8,
    "context": 160,
    "decode_slowdown": 0,
    "overlap": False,
    "packed_cache": 0,
    "collective_timeout": 60.0,
}
# Deviation of log-probabilities; codes of 8 bits may be rounded up on one side and down on the other.
BOUND = {"float32": 1e-4, "int8": 1e-2}
ONE: dict[str, Any] = {}
TWO: dict[str, Any] = {"tensor_parallel": 2}
FOUR: dict[str, Any] = {"tensor_parallel": 4}
STAGES = {"pipeline_parallel": 2, "tensor_parallel": 2}


@pytest.mark.extended("families", after=3)
@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("name", "here", "there", "kv_dtype"),
    [
        ("LlamaForCausalLM", ONE, FOUR, "float32"),
        ("LlamaForCausalLM", STAGES, ONE, "int8"),
        ("LlamaForCausalLM", TWO, FOUR, "int8"),
        ("LlamaForCausalLM", FOUR, STAGES, "float32"),
        ("MiniCPM3ForCausalLM", TWO, ONE, "float32"),
        ("MiniCPM3ForCausalLM", ONE, TWO, "float32"),
        ("Qwen3MoeForCausalLM", {"expert_parallel": 4}, TWO, "float32"),
    ],
)
def test_groups_of_any_size_compute_for_each_other(
    name: str, here: dict[str, Any], there: dict[str, Any], kv_dtype: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    families.write_checkpoint(name, tmp_path)
    settings = SMALL | {"model": str(tmp_path), "kv_dtype": kv_dtype}
    with ExitStack() as stack:
        decode = _engine(stack, EngineConfig(**settings, **here, block_size=4), Elsewhere(1))
        prefill = _engine(stack, EngineConfig(**settings, **there, block_size=16), None)
        prefill.sender.part_bytes = 3000
        assert decode.card().kv_format == prefill.card().kv_format != ""
        prompts = prompts_of(random.Random(3), decode.card().vocab_size)
        due = alone(Engine(EngineConfig(**settings)), prompts)
        found = Pair(decode, prefill, seed=3).run(prompts)
        assert decode.stats()["remote_prefills"] >= len(prompts) - 2
    for one, other in zip(found, due, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=BOUND[kv_dtype])


def _engine(stack: ExitStack, config: EngineConfig, placement: Elsewhere | None) -> Engine:
    if config.tensor_parallel * config.pipeline_parallel * config.expert_parallel == 1:
        return Engine(config, placement=placement)
    return stack.enter_context(group_engine(config, placement=placement))
