"""Blocks of many storages in Triton: what arrives is what was there, byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from motet_kernels.attention.blocks import Blocks

COUNT = 5
# Bytes of a row in each storage: whole vectors, some of one program and some of several; and what no vector fits.
ROWS = [(64, 9000 * 16, 16), (32, 10, 3), (1,), (2048 * 4,)]


def storages(rows: tuple[int, ...], device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    held = [
        torch.randint(0, 256, (COUNT, size), dtype=torch.uint8, generator=generator)
        for size in rows
    ]
    return [tensor.to(device) for tensor in held]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_are_copied(device: torch.device, rows: tuple[int, ...]) -> None:
    held = storages(rows, device)
    before = [tensor.clone() for tensor in held]
    Blocks(held).copy([0, 3], [4, 1])
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor, old[[0, 3, 2, 3, 0]])


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_travel(device: torch.device, rows: tuple[int, ...]) -> None:
    held = storages(rows, device)
    before, blocks = [tensor.clone() for tensor in held], Blocks(held)
    data = blocks.read([3, 0, 3])
    assert torch.equal(data, torch.cat([tensor[[3, 0, 3]] for tensor in held], dim=1))
    blocks.write([1, 4], list(data[:2].cpu()))
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor, old[[0, 3, 2, 3, 0]])
    blocks.write([2], [data[0]])
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor, old[[0, 3, 3, 3, 0]])


def test_nothing_to_move(device: torch.device) -> None:
    held = storages((32, 16), device)
    before, blocks = [tensor.clone() for tensor in held], Blocks(held)
    blocks.copy([], [])
    blocks.write([], list(blocks.read([])))
    assert all(torch.equal(tensor, old) for tensor, old in zip(held, before, strict=True))


def test_storages_of_other_types_and_shapes(device: torch.device) -> None:
    """A recurrent layer's states, for instance: rows are whatever one index takes."""
    states = [
        torch.randn(COUNT, 2, 3, device=device),
        torch.randn(COUNT, 4, device=device).bfloat16(),
    ]
    Blocks(states).copy([2], [0])
    assert all(torch.equal(state[0], state[2]) for state in states)
