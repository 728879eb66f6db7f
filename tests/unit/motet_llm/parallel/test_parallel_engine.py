"""A group's answers are those of one rank: ranks are threads of this process, connected by gloo.

Requests move between an engine of one rank and one of a group, at random: each goes on where the
other has stopped, and the whole answer is that of `transformers.generate`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from motet_llm.cache.first_use import FirstUse
from motet_llm.config import EngineConfig
from motet_llm.parallel.commands import PickRows
from motet_llm.parallel.leader import LeaderRunner
from motet_shared.errors import ConfigError
from support.engine.rank_families import SMALL, check_family
from support.engine.rank_threads import group_engine
from support.families import language_families as families


@pytest.mark.long(after=2)
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("LlamaForCausalLM", {"tensor_parallel": 2}),
        ("Qwen2ForCausalLM", {"pipeline_parallel": 2}),
        ("Qwen3ForCausalLM", {"tensor_parallel": 4}),
        ("Qwen3MoeForCausalLM", {"expert_parallel": 2}),
        ("Qwen3MoeForCausalLM", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ],
)
def test_a_group_answers_as_generate_does(
    name: str, degrees: dict[str, Any], tmp_path: Path
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


def test_an_idle_group_takes_the_same_memory_on_all_ranks(tmp_path: Path) -> None:
    families.write_checkpoint("LlamaForCausalLM", tmp_path)
    config = EngineConfig(**SMALL, model=str(tmp_path), tensor_parallel=2)
    taken: Counter[int] = Counter()
    take_page = FirstUse.take_page

    def count(use: FirstUse, blocks: int) -> bool:
        taken[id(use)] += (is_taken := take_page(use, blocks))
        return is_taken

    with patch.object(FirstUse, "take_page", count), group_engine(config) as engine:
        assert engine.take_memory()
        while engine.take_memory():
            pass
        leader = engine.runner
        assert isinstance(leader, LeaderRunner)
        leader.ranks.ask(PickRows(0, [0]))  # behind what was sent before
    assert len(taken) == 2
    assert len(set(taken.values())) == 1
