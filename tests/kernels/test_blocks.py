"""Blocks of many storages on the CPU, and what they refuse on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from motet_kernels.attention.blocks import Blocks
from motet_kernels.runtime.errors import KernelError

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
    ("call", "message"),
    [
        (lambda b: b.copy([0, 5], [1, 2]), r"sources\[1\]: block 5 must be from 0 to 4"),
        (lambda b: b.copy([0], [-1]), r"targets\[0\]: block -1 must be from 0 to 4"),
        (lambda b: b.copy([0], [1, 2]), "targets: 2 blocks must be as many as the 1 sources"),
        (
            lambda b: b.copy([0, 1], [1, 2]),
            r"targets: \[1, 2\] must be distinct and none of the sources \[0, 1\]",
        ),
        (lambda b: b.copy([0, 0], [1, 1]), "must be distinct"),
        (lambda b: b.read([7]), r"blocks\[0\]: block 7"),
        (
            lambda b: b.write([0], [BYTES[:18]]),
            r"contents\[0\]: torch.uint8 \[18\] must be torch.uint8 \[19\]",
        ),
        (lambda b: b.write([0], [BYTES.float()]), r"contents\[0\]: torch.float32"),
        (lambda b: b.write([0, 0], [BYTES, BYTES]), r"blocks: \[0, 0\] must be distinct"),
        (lambda b: b.write([0, 1], [BYTES]), "as many as the 1 contents"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_changes(
    call: Callable[[Blocks], Any], message: str
) -> None:
    under_test, held = blocks()
    before = [tensor.clone() for tensor in held]
    with pytest.raises(KernelError, match=message):
        call(under_test)
    assert all(torch.equal(tensor, old) for tensor, old in zip(held, before, strict=True))


def test_storages_must_be_alike() -> None:
    with pytest.raises(
        KernelError, match=r"storages\[1\]: shape \[4, 2\].*as many as the first storage has"
    ):
        Blocks([torch.zeros(5, 2), torch.zeros(4, 2)])
    with pytest.raises(KernelError, match=r"storages\[0\]: shape \[5, 2\], strides \[1, 5\]"):
        Blocks([torch.zeros(2, 5).T])


def test_a_cache_of_nothing_has_no_blocks() -> None:
    nothing = Blocks([])
    nothing.copy([], [])
    assert nothing.read([]).shape == (0, 0)
    with pytest.raises(KernelError, match="block 0 must be from 0 to -1"):
        nothing.read([0])
