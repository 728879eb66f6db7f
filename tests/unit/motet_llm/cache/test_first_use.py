"""Test that memory is taken before blocks use it: in their order, no more than asked for, its contents untouched."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import psutil
import torch

from motet_kernels.runtime.memory import HUGE, huge_zeros
from motet_llm.cache.block_pool import BlockPool
from motet_llm.cache.first_use import FirstUse
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint

BLOCKS, PAGES = 512, 24  # blocks, and pages of a storage


def resident() -> int:
    """Return the bytes that this process holds in memory."""
    return psutil.Process().memory_info().rss


def storages() -> list[torch.Tensor]:
    return [huge_zeros((BLOCKS, PAGES * HUGE // BLOCKS), torch.uint8) for _ in range(2)]


def test_pages_are_taken_in_the_order_of_their_blocks() -> None:
    first, second = storages()
    first[BLOCKS // 2] = 7
    use, before = FirstUse([first, second]), resident()
    half = sum(use.take_page(BLOCKS // 2) for _ in range(4 * PAGES))
    assert half == PAGES  # half of both
    assert resident() - before > 0.9 * half * HUGE
    rest = sum(use.take_page(BLOCKS) for _ in range(4 * PAGES))
    assert rest == PAGES
    assert not use.take_page(BLOCKS)
    assert first[BLOCKS // 2].eq(7).all()
    assert int(first.sum()) == 7 * first.shape[1]


def test_without_storage_there_is_nothing_to_take() -> None:
    assert not FirstUse([]).take_page(BLOCKS)


def test_a_pool_knows_the_blocks_that_were_ever_used() -> None:
    pool = BlockPool(8, 16)
    assert pool.reached == 0
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert pool.reached == 3
    pool.allocate(2)
    assert pool.reached == 3
    pool.allocate(4)
    assert pool.reached == 6
    pool.allocate(0)
    assert pool.reached == 6


def test_a_running_engine_takes_a_page_in_each_step(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_checkpoint("qwen3", tmp_path)), threads=1, num_blocks=32)
    engine, taken = Engine(config), 0
    take_page = FirstUse.take_page

    def count(use: FirstUse, blocks: int) -> bool:
        nonlocal taken
        taken += (is_taken := take_page(use, blocks))
        return is_taken

    engine.add(0, [1, 2, 3], Sampling(max_tokens=8, temperature=0, ignore_eos=True))
    counts = []
    with patch.object(FirstUse, "take_page", count):
        while engine.has_work:
            engine.step(lambda outputs: None)
            counts.append(taken)
        assert not engine.take_memory(), "all of this small pool"
    assert counts[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(counts))
    assert counts[-1] > 1
