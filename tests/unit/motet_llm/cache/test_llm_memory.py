"""A worker's memory: weights, states and KV cache fit a share of what is free, taken when used."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.config import EngineConfig
from motet_llm.engine import memory_budget
from motet_llm.engine.engine import Engine
from motet_models.capacity import Settings, plan
from motet_models.graph_sizes import StepShape
from motet_models.model_config import model_shape, read_config
from motet_shared.errors import ConfigError
from support.checkpoints.language_checkpoints import tiny_checkpoint

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path)


def blocks(folder: Path, **options: object) -> int:
    """Return the blocks of an engine whose cache is bounded by its memory alone."""
    return Engine(
        EngineConfig(model=str(folder), max_running=512, **options)  # type: ignore[arg-type]
    ).pool.num_blocks


def set_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(memory_budget, "available_memory", lambda: nbytes)


def test_the_cache_takes_what_the_rest_leaves_of_the_share(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_free(monkeypatch, 24 * MIB)
    whole = Engine(EngineConfig(model=str(folder), max_running=512, memory_share=1.0))
    used = whole.runner.kv.nbytes + whole.runner.weight_bytes
    assert 16 * MIB < used <= 24 * MIB
    half = Engine(EngineConfig(model=str(folder), max_running=512, memory_share=0.5))
    saved = whole.runner.kv.nbytes - half.runner.kv.nbytes
    assert abs(saved - 12 * MIB) <= whole.runner.kv.layout.block_bytes
    assert {"memory", "weights", "packed", "kv_cache"} == whole.runner.capacity().keys()


def test_memory_in_bytes_takes_precedence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_free(monkeypatch, 1 << 40)
    assert blocks(folder, memory=24 * MIB) < blocks(folder, memory=32 * MIB)
    assert blocks(folder, memory=24 * MIB, kv_memory=MIB) < blocks(folder, memory=24 * MIB)


def test_a_cache_is_no_larger_than_requests_can_use(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), max_running=2, token_budget=2))
    assert engine.pool.num_blocks == 2 * -(-engine.context // 16)


@pytest.mark.parametrize(
    ("nbytes", "reason"), [(64 << 10, "before"), (1 * MIB, "after")], ids=["before", "after"]
)
def test_weights_that_leave_no_room_are_refused(folder: Path, nbytes: int, reason: str) -> None:
    """Before anything is loaded if the weights alone exceed it, else once all is counted."""
    with pytest.raises(ConfigError) as raised:
        Engine(EngineConfig(model=str(folder), memory=nbytes))
    assert raised.value.param == "memory"


def test_graphs_take_what_plans_say(folder: Path) -> None:
    config = EngineConfig(model=str(folder), max_running=8, num_blocks=8)
    runner = Engine(config).runner
    step = StepShape(
        hidden=runner.model.config.hidden_size,
        widest=0,
        vocab=runner.vocab,
        elements=max(layer.elements for layer in runner._shapes.layers.values()),
        groups=len(runner.kv.groups),
        element_bytes=2,
    )
    settings = Settings(max_running=8, activation_bytes=2, cuda_graphs=True)
    planned = plan(model_shape(read_config(folder), folder), settings, 1 << 40, runner.context)
    assert memory_budget.graph_memory(config, step, runner.context) == planned.graphs > 0


def test_graphs_need_a_gpu(folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        Engine(EngineConfig(model=str(folder), num_blocks=8, cuda_graphs=True))
    assert raised.value.param == "cuda_graphs"


def test_a_draft_model_has_its_part(folder: Path, tmp_path: Path) -> None:
    alone = Engine(EngineConfig(model=str(folder), max_running=512, memory=24 * MIB))
    both = Engine(
        EngineConfig(model=str(folder), max_running=512, memory=24 * MIB, speculate=str(folder))
    )
    assert 0.4 < both.pool.num_blocks / alone.pool.num_blocks < 0.52


def test_pages_are_taken_when_they_are_written() -> None:
    before = resident()
    cache = KvCache({0: LayerShape(1, 64, 64)}, 1 << 16, 16, torch.float32)
    assert cache.nbytes > 500 * MIB
    assert resident() - before < 16 * MIB
    cache.rows(0)[:1024].fill_(1)
    assert resident() - before > 7 * MIB


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
