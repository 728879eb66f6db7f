"""Sums and joins in shared memory: ranks are threads with mappings of their own, or forked processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from motet_kernels.rank_memory import RankMemory, RanksApart, create, sum_in_pairs
from motet_kernels.runtime.errors import KernelError
from motet_kernels.runtime.replay import Tape

Result = TypeVar("Result")
LONGER_THAN_A_SLOT = 300_000
SECONDS = 0.3  # deadline of ranks that wait in vain
LATEST = 10.0  # seconds on a busy machine


def by_ranks(size: int, compute: Callable[[RankMemory], Result]) -> list[Result]:
    """Return what `compute` returns for each rank."""
    memory = create(size)
    try:
        with ThreadPoolExecutor(size) as pool:
            return [
                *pool.map(lambda rank: compute(RankMemory(memory, rank, size, 60.0)), range(size))
            ]
    finally:
        os.close(memory)


def parts_of(size: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(count)
    return [(torch.randn(count, generator=draw) * 10**rank).to(dtype) for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 37, 1024, LONGER_THAN_A_SLOT])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_rank_has_the_bits_of_the_twin(
    isa: str, size: int, count: int, dtype: torch.dtype
) -> None:
    parts = parts_of(size, count, dtype)
    for found in by_ranks(size, lambda memory: memory.sum(parts[memory.rank].clone())):
        assert torch.equal(found, sum_in_pairs(parts))


def test_many_sums_one_after_the_other(isa: str) -> None:
    """No rank overwrites what another one still reads, whatever their lengths are."""

    def compute(memory: RankMemory) -> list[Tensor]:
        return [
            memory.sum(parts_of(3, count, torch.float32)[memory.rank])
            for count in (5, 700, 140_000, 1) * 20
        ]

    for found in by_ranks(3, compute):
        for one in found:
            assert torch.equal(one, sum_in_pairs(parts_of(3, len(one), torch.float32)))


@pytest.mark.parametrize(("rows", "widths"), [(1, [4]), (3, [5, 0, 2]), (9, [70_000, 1, 66_001])])
def test_parts_are_joined_side_by_side(isa: str, rows: int, widths: list[int]) -> None:
    parts = [torch.arange(rows * width).view(rows, width) + 7 * width for width in widths]

    def compute(memory: RankMemory) -> Tensor:
        return memory.join(parts[memory.rank], widths, takes=memory.rank != 1)

    for rank, found in enumerate(by_ranks(len(widths), compute)):
        assert torch.equal(found, parts[1] if rank == 1 else torch.cat(parts, dim=1))


def test_a_sum_is_replayed(isa: str) -> None:
    def compute(memory: RankMemory) -> Tensor:
        x = torch.ones(100)
        tape = Tape(lambda: memory.sum(x))
        return tape.replay().clone()

    assert all(torch.equal(found, torch.full((100,), 4.0)) for found in by_ranks(2, compute))


@pytest.mark.parametrize(
    "x", [torch.ones(4, dtype=torch.float64), torch.ones(4, 4).t(), torch.ones(8)[::2]]
)
def test_other_tensors_are_refused(isa: str, x: Tensor) -> None:
    with pytest.raises(KernelError) as refused:
        by_ranks(1, lambda memory: memory.sum(x))
    assert refused.value.param == "x"


@contextmanager
def given_up() -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(RanksApart):
        yield
    assert SECONDS / 2 < time.monotonic() - began < LATEST


@contextmanager
def forked(compute: Callable[[RankMemory], object]) -> Iterator[tuple[RankMemory, int]]:
    """Fork rank 1, which computes for ever; provide rank 0 and its process id."""
    descriptor = create(2)
    memory = RankMemory(descriptor, 0, 2, 60.0)
    pid = os.fork()
    if pid == 0:
        own = RankMemory(descriptor, 1, 2, 60.0)
        while True:
            compute(own)
    os.close(descriptor)
    try:
        yield memory, pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_gone_is_given_up(isa: str, number: signal.Signals) -> None:
    x = torch.ones(100)
    with forked(lambda own: own.sum(x)) as (memory, pid):
        assert memory.sum(torch.ones(100))[0] == 2
        memory.limit(SECONDS)
        os.kill(pid, number)
        with given_up():
            for _ in range(100):
                memory.sum(torch.ones(100))
        with pytest.raises(RanksApart):
            memory.sum(torch.ones(100))
        assert memory.failed


def test_a_waiting_rank_is_told_that_the_group_has_failed(isa: str) -> None:
    descriptor = create(2)
    memory = RankMemory(descriptor, 0, 2, 60.0)
    os.close(descriptor)
    threading.Timer(SECONDS, memory.break_off).start()
    with given_up():
        memory.meet()


def test_ranks_that_wait_sleep(isa: str) -> None:
    """A core is free for others while a rank waits."""
    descriptor = create(2)
    memory = RankMemory(descriptor, 0, 2, 1.0)
    os.close(descriptor)
    began = time.thread_time()
    with pytest.raises(RanksApart):
        memory.meet()
    assert time.thread_time() - began < 0.2
