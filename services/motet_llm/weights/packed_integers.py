"""Unpack small integers from int32, as GPTQ, AWQ and compressed-tensors store them.

Shapes: R rows, C columns of small integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

# AWQ's kernels read the two halves of a word alternately.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_columns(packed: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return uint8 `[R, C]` of int32 `[R, C · bits / 32]`, the lowest bits first.

    With `order`, the i-th bits hold column `order[i]` of their word.
    """
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    if order is not None:
        values = values[:, :, torch.tensor(order).argsort()]
    assert values.shape[2] == count
    return values.flatten(1).to(torch.uint8)


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """Return uint8 `[R, C]` of int32 `[R · bits / 32, C]`, the lowest bits first."""
    return unpack_columns(packed.T, bits).T
