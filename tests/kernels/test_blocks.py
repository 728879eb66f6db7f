"""Blocks of many storages on the CPU, and what they refuse on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from motet_kernels.attention.blocks import Blocks
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

BYTES = torch.ones(19, dtype=torch.uint8)


def blocks() -> tuple[Blocks, list[torch.Tensor]]:
    held = [torch.arange(20.0).view(5, 4), torch.arange(15, dtype=torch.uint8).view(5, 3)]
    return Blocks(held), held


def test_blocks_are_copied_in_every_storage() -> None:
    under_test, held = blocks()
    before = [tensor.clone() for tensor in held]
    under_test.copy([0, 2], [1, 4])
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor, old[[0, 0, 2, 3, 2]])


def test_what_was_read_is_a_copy_that_can_be_written() -> None:
    under_test, held = blocks()
    before = [tensor.clone() for tensor in held]
    data = under_test.read([3, 1])
    assert data.shape == (2, under_test.nbytes) == (2, 4 * 4 + 3)
    for tensor in held:
        tensor.zero_()
    under_test.write([0, 2], list(data))
    for tensor, old in zip(held, before, strict=True):
        assert torch.equal(tensor[[0, 2]], old[[3, 1]])
        assert not tensor[[1, 3, 4]].any()


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda b: b.copy([0, 5], [1, 2]), "sources[1]"),
        (lambda b: b.copy([0], [-1]), "targets[0]"),
        (lambda b: b.copy([0], [1, 2]), "targets"),
        (
            lambda b: b.copy([0, 1], [1, 2]),
            "targets",
        ),
        (lambda b: b.copy([0, 0], [1, 1]), "targets"),
        (lambda b: b.read([7]), "blocks[0]"),
        (
            lambda b: b.write([0], [BYTES[:18]]),
            "contents[0]",
        ),
        (lambda b: b.write([0], [BYTES.float()]), "contents[0]"),
        (lambda b: b.write([0, 0], [BYTES, BYTES]), "blocks"),
        (lambda b: b.write([0, 1], [BYTES]), "blocks"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(
    call: Callable[[Blocks], Any], param: str
) -> None:
    under_test, held = blocks()
    before = [tensor.clone() for tensor in held]
    with refuses(KernelError, param):
        call(under_test)
    assert all(torch.equal(tensor, old) for tensor, old in zip(held, before, strict=True))


def test_storages_must_be_alike() -> None:
    with refuses(KernelError, "storages[1]"):
        Blocks([torch.zeros(5, 2), torch.zeros(4, 2)])
    with refuses(KernelError, "storages[0]"):
        Blocks([torch.zeros(2, 5).T])


def test_a_cache_of_nothing_has_no_blocks() -> None:
    nothing = Blocks([])
    nothing.copy([], [])
    assert nothing.read([]).shape == (0, 0)
    with refuses(KernelError, "blocks[0]"):
        nothing.read([0])
