"""The parts of a model that ranks hold, against what the engine's ranks hold of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from motet_llm.config import EngineConfig
from motet_models.capacity import KV_FORMATS, layout_of
from motet_models.model_config import model_shape, read_config
from motet_models.ranks import Ranks, largest_share
from motet_models.weight_formats import WEIGHT_FORMATS, weight_bytes
from motet_shared.errors import ConfigError
from support.engine.rank_threads import group_engine
from support.families import language_families as families
from support.peers.public_models import KNOWN

SHAPES = {name: model_shape(facts[3]) for name, facts in KNOWN.items()}
FLOAT32 = WEIGHT_FORMATS["float32"]


@pytest.mark.parametrize("name", SHAPES)
def test_one_rank_holds_the_whole_model(name: str) -> None:
    assert largest_share(SHAPES[name], Ranks()) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_more_ranks_need_less_memory_each(name: str) -> None:
    shape = SHAPES[name]
    whole = weight_bytes(shape, FLOAT32)
    halves = weight_bytes(largest_share(shape, Ranks(pipeline=2)), FLOAT32)
    quarters = weight_bytes(largest_share(shape, Ranks(pipeline=4)), FLOAT32)
    assert whole / 2 * 0.95 < halves < whole
    assert quarters < halves


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    shape = next(iter(SHAPES.values()))
    with pytest.raises(ConfigError, match=r"^pipeline_parallel=999: .* layers; give"):
        largest_share(shape, Ranks(pipeline=999))
    with pytest.raises(ConfigError, match=r"^tensor_parallel=7: .* heads"):
        largest_share(shape, Ranks(tensor=7))


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("LlamaForCausalLM", {"tensor_parallel": 2}),
        ("LlamaForCausalLM", {"pipeline_parallel": 2}),
        ("Qwen3MoeForCausalLM", {"expert_parallel": 4}),
        ("Qwen3MoeForCausalLM", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ],
)
def test_a_rank_holds_what_is_planned(name: str, degrees: dict[str, Any], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    families.write_checkpoint(name, tmp_path)
    ranks = Ranks(
        tensor=degrees.get("tensor_parallel", 1),
        pipeline=degrees.get("pipeline_parallel", 1),
        expert=degrees.get("expert_parallel", 1),
    )
    share = largest_share(model_shape(read_config(tmp_path), tmp_path), ranks)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        threads=1,
        num_blocks=40,
        max_running=4,
        packed_cache=0,
        **degrees,
    )
    with group_engine(config) as engine:
        held = engine.runner.weight_bytes
        layout = layout_of(share.layers, 16, KV_FORMATS["float32"])
        assert engine.runner.kv.nbytes == pytest.approx(41 * layout.block_bytes)
    assert held == pytest.approx(weight_bytes(share, FLOAT32), rel=0.05)
