"""Shares: every feature, head, layer and expert belongs to a rank, and to one only."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_llm.config import EngineConfig
from motet_llm.parallel.cuts.pipeline_cut import stage_layers
from motet_llm.parallel.cuts.shares import GRANULE, divide, key_heads
from motet_llm.parallel.degrees import Degrees
from motet_shared.errors import ConfigError


@given(size=st.integers(1, 20_000), ranks=st.integers(1, 16))
def test_ranks_divide_a_size(size: int, ranks: int) -> None:
    shares = [divide(size, place, ranks) for place in range(ranks)]
    assert shares[0].begin == 0
    assert shares[-1].end == size
    assert all(one.end == other.begin for one, other in pairwise(shares))
    assert max(s.width for s in shares) - min(s.width for s in shares) <= GRANULE


def test_large_sizes_are_divided_where_scales_end() -> None:
    shares = [divide(11_008, place, 3) for place in range(3)]
    assert all(share.begin % GRANULE == 0 for share in shares)


@pytest.mark.parametrize(
    ("heads", "ranks", "held"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1)] * 3),
    ],
)
def test_several_ranks_hold_a_head_if_there_are_fewer(
    heads: int, ranks: int, held: list[tuple[int, int]]
) -> None:
    shares = [key_heads(heads, place, ranks) for place in range(ranks)]
    assert [(share.begin, share.end) for share in shares] == held


@given(layers=st.integers(1, 100), stages=st.integers(1, 100))
def test_every_stage_has_layers(layers: int, stages: int) -> None:
    if stages > layers:
        return
    shares = [stage_layers(layers, stage, stages) for stage in range(stages)]
    assert sum(share.width for share in shares) == layers
    assert min(share.width for share in shares) >= 1


def test_ranks_of_a_stage_follow_each_other() -> None:
    degrees = Degrees(tensor=2, pipeline=3)
    assert degrees.ranks == 6
    assert [degrees.stage(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [degrees.place(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"tensor_parallel": 2, "expert_parallel": 3}, "expert_parallel"),
        ({"tensor_parallel": 2, "device": "cuda"}, "device"),
        ({"expert_parallel": 3, "deterministic": True}, "expert_parallel"),
        ({"expert_parallel": 2, "host_cache": 1 << 20}, "host_cache"),
        ({"tensor_parallel": 2, "attention_budget": 64}, "attention_budget"),
        ({"tensor_parallel": 2, "stage": "talker"}, "stage"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
    ],
)
def test_settings_that_a_group_cannot_follow_are_refused(
    settings: dict[str, object], field: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"^{field}={settings[field]!r}: ") as raised:
        EngineConfig(model=str(folder), **settings)  # type: ignore[arg-type]
    assert raised.value.param == field
